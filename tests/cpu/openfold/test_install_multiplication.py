"""turbopair as OpenFold3's triangle multiplications: single layers, for what a step does not reach (test_install has the model)."""

import copy
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pipeline.openfold import model
from tests.cpu.openfold.test_install import LAYER_FACTOR, difference, inputs
from turbopair.openfold3 import MULTIPLICATION, NotServed, install, uninstall

N, C = 9, 32


@pytest.fixture
def layer(openfold3):
    """A function building a triangle multiplication with no weight zero and layer norms that do something."""
    from openfold3.core.model.layers import triangular_multiplicative_update as layers

    def build(direction="outgoing", c=C, hidden=C, fused=False):
        torch.manual_seed(0)
        name = f"{'Fused' if fused else ''}TriangleMultiplication{direction.capitalize()}"
        multiplication = getattr(layers, name)(c, hidden)
        model.fill_zero_initialised(multiplication, 1.0)
        with torch.no_grad():
            for norm in (multiplication.layer_norm_in, multiplication.layer_norm_out):
                norm.weight.add_(0.2 * torch.randn(norm.weight.shape))
                norm.bias.add_(0.2 * torch.randn(norm.bias.shape))
        return multiplication

    return build


def test_a_compiled_model_is_compiled_once_or_twice(layer):
    multiplication = layer()
    z, mask = inputs(1, N, N, C)
    installation = install(multiplication, strict=True)
    expected = multiplication(z, mask)
    torch.compiler.reset()
    compiled = torch.compile(multiplication, backend="aot_eager", fullgraph=True)
    compiled(z, mask)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            assert torch.equal(compiled(z, mask), expected)
    assert installation.report()[0].calls == 1  # what torch.compile traced is not counted


def update(multiplication, z, mask, bf16=False, **options):
    """Output and the gradients to z and every parameter."""
    multiplication.zero_grad()
    z = z.detach().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        out = multiplication(z, mask, **options)
        # as in a training step, whose backward runs inside autocast
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype))
    return {"out": out.detach(), "z": z.grad, **{name: p.grad.clone() for name, p in multiplication.named_parameters()}}


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("shape", [(1, N, N, C), (1, 2, N, N, C)], ids=["pair", "templates"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_layer_agrees_with_stock(layer, shape, direction, masked):
    multiplication = layer(direction)
    z, mask = inputs(*shape)
    mask = mask if masked else None
    expected = update(multiplication, z, mask)
    original = type(multiplication)
    with install(multiplication, strict=True) as installation:
        assert isinstance(multiplication, original) and type(multiplication) is not original
        actual = update(multiplication, z, mask)
        assert [row[1:] for row in installation.report()] == [(MULTIPLICATION, "turbopair", None, 1, 0)]
    assert type(multiplication) is original and not hasattr(multiplication, "_turbopair")
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5 * value.abs().max().item())


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bf16_layer_is_no_worse_than_stock_against_fp64(layer, dtype, direction):
    """Also where z is fp32 under autocast: OpenFold3's layer norm sees it unrounded, the operator rounded to bf16."""
    multiplication = layer(direction, c=64, hidden=64)
    z, mask = inputs(1, 40, 40, 64, dtype=dtype)
    expected = update(copy.deepcopy(multiplication).double(), z.double(), mask.double())
    stock = update(multiplication, z, mask, bf16=True)
    install(multiplication, strict=True)
    own = update(multiplication, z, mask, bf16=True)
    assert {name: t.dtype for name, t in own.items()} == {name: t.dtype for name, t in stock.items()}
    assert own["out"].dtype == torch.bfloat16 and own["z"].dtype == dtype and own["linear_z.weight"].dtype == torch.float32
    for together in (["out"], ["z"], [name for name in expected if name not in ("out", "z")]):
        pick = [{name: result[name] for name in together} for result in (expected, own, stock)]
        assert difference(pick[0], pick[1]) < LAYER_FACTOR * difference(pick[0], pick[2]) < 0.05, together


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("add", [True, False])
def test_inference_in_place_is_what_openfold3_does(layer, direction, bf16, add):
    multiplication = layer(direction)
    z, mask = inputs(1, N, N, C, dtype=torch.bfloat16 if bf16 else torch.float32)
    options = {"inplace_safe": True, "_add_with_inplace": add}
    close = {"rtol": 0.05, "atol": 0.03} if bf16 else {"rtol": 1e-4, "atol": 1e-5}
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        expected = multiplication(z.clone(), mask, **options)
        installation = install(multiplication, strict=True)
        own = z.clone()
        result = multiplication(own, mask, **options)
        assert result is own and result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, **close)
        torch.testing.assert_close(result, z + multiplication(z, mask) if add else multiplication(z, mask), **close)
        # cuEquivariance's setting overrides working in place, also in OpenFold3; the kernels stay turbopair's
        before = own.clone()
        multiplication(own, mask, use_cueq_triangle_kernels=True, **options)
        assert torch.equal(own, before)
    assert installation.report()[0].stock_calls == 0


def test_a_pair_block_in_evaluation_agrees_in_place_and_not(openfold3):
    from openfold3.core.model.latent.base_blocks import PairBlock

    torch.manual_seed(0)
    block = PairBlock(C, C, 8, 4, "swiglu", 2, 0.25, False, 1e9).eval()
    model.fill_zero_initialised(block, 1.0)
    z, mask = inputs(1, N, N, C)
    with torch.inference_mode():
        expected = block(z.clone(), mask)
        with install(block, strict=True) as installation:
            for in_place in (False, True):
                actual = block(z.clone(), mask, inplace_safe=in_place, chunk_size=4 if in_place else None)
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        assert [row.calls for row in installation.report()] == [2] * 4
        torch.testing.assert_close(block(z.clone(), mask, inplace_safe=True, chunk_size=4), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_the_same(layer, monkeypatch, reentrant, served):
    from turbopair import openfold3_layers

    multiplication = layer()
    z, mask = inputs(1, N, N, C, dtype=torch.bfloat16)
    if not served:
        monkeypatch.setattr(openfold3_layers, "supports_multiplication", lambda *args: "not today")
    results = []
    for call in (multiplication, lambda z, mask: checkpoint(multiplication, z, mask, use_reentrant=reentrant)):
        uninstall(multiplication)
        installation = install(multiplication)
        multiplication.zero_grad()
        with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
            warnings.filterwarnings("ignore", message=".*not today")
            out = call(z, mask)
        out.float().square().sum().backward()
        results.append([p.grad.clone() for p in multiplication.parameters()])
    row = installation.report()[0]
    assert (row.calls, row.stock_calls) == ((2, 0) if served else (0, 2))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*results, strict=True))


def test_what_cannot_be_served_runs_stock_or_raises(layer):
    multiplication = layer()
    z, mask = inputs(1, N, N, C)
    installation = install(multiplication)
    warned = pytest.warns(UserWarning, match=r"does not serve .*OpenFold3's own code runs: z has dtype torch\.float16")
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad(), warned:
        result = multiplication(z, mask)
    assert result.dtype == torch.float16 and installation.report()[0].stock_calls == 1
    installation.remove()
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
        torch.testing.assert_close(result, multiplication(z, mask), rtol=0, atol=0)
    install(multiplication, strict=True)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(NotServed, match=r"z has dtype torch\.float16"):
        multiplication(z, mask)


def test_a_site_that_can_never_be_served_is_left_alone(layer):
    biased, uneven = layer(), layer()
    biased.linear_g.bias = torch.nn.Parameter(torch.zeros(C))
    uneven.layer_norm_out.eps = 1e-3
    sites = {"fits": layer(), "narrow": layer(c=16, hidden=16), "uneven hidden": layer(c=64, hidden=32), "fused": layer(fused=True)}
    module = torch.nn.ModuleDict({name.replace(" ", "_"): site for name, site in {**sites, "biased": biased, "eps": uneven}.items()})
    with pytest.raises(NotServed, match="cannot serve narrow: C is 16"):
        install(module, strict=True)
    assert uninstall(module) == 0
    with pytest.warns(UserWarning):
        installation = install(module)
    rows = {row.site: row for row in installation.report()}
    assert rows["fits"].served_by == "turbopair" and rows["fits"].reason is None
    for site, reason in {
        "narrow": "C is 16", "uneven_hidden": "beside C = 64; accepted: ", "eps": "two eps, 1e-05 and 0.001",
        "fused": "FusedTriangleMultiplicationOutgoing is none of", "biased": "its linear_g has a bias",
    }.items():  # fmt: skip
        assert rows[site].served_by == "stock" and rows[site].stock_calls is None and reason in rows[site].reason, site
    assert "serves 1 of 6 triangle multiplications" in str(installation)
