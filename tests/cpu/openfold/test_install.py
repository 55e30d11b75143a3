"""turbopair inside OpenFold3: the reduced model on a real batch with padded tokens, and single layers for what a step does not reach."""

import copy
import importlib.metadata
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import turbopair.openfold3
from pipeline.experiments import step_time
from pipeline.openfold import batches, model
from pipeline.openfold.gradients import distance, gradients
from pipeline.openfold.ranks import Ranks
from pipeline.openfold.step import TrainingStep
from turbopair.openfold3 import ATTENTION, MULTIPLICATION, NotServed, install, uninstall

# fp32: relative difference of all gradients of the triangle operations of a kind together; measured 2e-7, wrong kernels 5e-2 and more
TOLERANCE = 1e-5
# bf16: turbopair's error over that of OpenFold3's own bf16; in the whole model the rest of it rounds as well
MODEL_FACTOR, LAYER_FACTOR = 1.1, 1.0
REAL, PADDED = 27, 5
PARTS = ("", "tri_att", "tri_mul")


@pytest.fixture(scope="session")
def batch():
    """The last real tokens of a batch and the first padded ones, which `batches.crop` would not give: rows fully masked."""
    whole = batches.read("2q2k_384")
    end = int(whole["token_mask"].sum())
    cut = batches._select(whole, torch.arange(end - REAL, end + PADDED), msa_rows=8)
    assert cut["token_mask"].sum() == REAL and cut["token_mask"].shape == (1, REAL + PADDED)
    return cut


@pytest.fixture(scope="session")
def stock(modules):
    module = modules("pytorch", 0.5)
    model.fix_recycles(module.model, 0)
    return module


@pytest.fixture(scope="session")
def run(batch):
    """A function giving the loss and all parameter gradients of a module's forward and backward; the same noise each time."""

    def run(module, bf16=False):
        return gradients(module, batch, bf16=bf16)

    return run


@pytest.fixture(scope="session")
def stock_run(stock, run):
    return run(stock)


@pytest.fixture
def plugged(stock):
    module = copy.deepcopy(stock)
    return module, install(module.model, strict=True)


def difference(expected, actual, part=""):
    """Relative L2 distance of the gradients whose names contain `part`, taken together."""
    return distance(expected, actual, lambda name: part in name)


def agrees(expected, actual):
    loss, right = expected
    return abs(actual[0] - loss) < TOLERANCE * abs(loss) and all(difference(right, actual[1], part) < TOLERANCE for part in PARTS)


def test_every_site_is_served_and_agrees_with_stock_in_fp32(plugged, run, stock_run):
    module, installation = plugged
    attentions, multiplications = (
        {name: m for name, m in module.model.named_modules() if name.endswith(endings)}
        for endings in (("tri_att_start", "tri_att_end"), ("tri_mul_out", "tri_mul_in"))
    )
    sites = attentions | multiplications
    inner = {name: site.mha for name, site in attentions.items()} | {name: site.layer_norm_in for name, site in multiplications.items()}
    stock_calls = []
    for name, part in inner.items():
        part.register_forward_hook(lambda *_, name=name: stock_calls.append(name))
    result = run(module)
    rows = {row.site: row for row in installation.report()}
    # 4 templates go through one stack; each call is computed once more, under checkpointing, in the backward. A multiplication
    # takes the templates' calls as they come, too.
    assert {name: rows[name].calls for name in sites} == {name: 8 if "template" in name else 2 for name in sites}
    parts = ("template_embedder.", "msa_module.", "pairformer_stack.", "aux_heads.")
    for kind in (attentions, multiplications):
        assert [sum(name.startswith(part) for name in kind) for part in parts] == [2, 2, 4, 2]
    assert not stock_calls and not model.not_served(installation)
    assert rows == {
        name: (name, ATTENTION if name in attentions else MULTIPLICATION, "turbopair", None, rows[name].calls, 0) for name in sites
    }
    assert [line.split(" (")[0] for line in str(installation).splitlines()] == [
        "turbopair serves 10 of 10 triangle attentions",
        "turbopair serves 10 of 10 triangle multiplications",
    ]

    assert agrees(stock_run, result)
    own = {name: gradient for name, gradient in stock_run[1].items() if "tri_att" in name or "tri_mul" in name}
    # norm (2), linear_z, and q, k, v, g, o of each attention; two norms and six linears of each multiplication
    assert len(own) == 10 * 8 + 10 * 10
    # each one by itself, none of them zero or rounding noise of the loss
    assert max(difference(stock_run[1], result[1], name) for name in own) < 100 * TOLERANCE
    assert min(gradient.norm() for gradient in own.values()) > 1e-7 * stock_run[0]


@pytest.mark.parametrize("kind", [ATTENTION, MULTIPLICATION])
def test_one_kind_can_be_left_alone(stock, run, stock_run, kind):
    module = copy.deepcopy(stock)
    left = kind.removeprefix("triangle_")
    with install(module.model, strict=True, **{left: False}) as installation:
        result = run(module)
    assert agrees(stock_run, result)
    for row in installation.report():
        if row.operator == kind:
            assert row[2:] == ("stock", f"not asked for: {left}=False", 0, None)
        else:
            assert row.served_by == "turbopair" and row.calls and not row.stock_calls
    assert not model.not_served(installation)  # of what it was given
    assert f"turbopair serves 0 of 10 {kind.replace('_', ' ')}s" in str(installation) and f"{left}=False (10 sites" in str(installation)


WRONG = {
    "without bias": lambda q, k, v, bias, mask: (q, k, v, bias * 0, mask),
    "without mask": lambda q, k, v, bias, mask: (q, k, v, bias, None),
    "bias transposed": lambda q, k, v, bias, mask: (q, k, v, bias.mT, mask),
    "scale": lambda q, k, v, bias, mask: (q * 1.1, k, v, bias, mask),
}
WRONG_MULTIPLICATION = {
    "direction": lambda z, mask, w, direction, eps: (z, mask, w, "incoming" if direction == "outgoing" else "outgoing", eps),
    "without mask": lambda z, mask, w, direction, eps: (z, None, w, direction, eps),
    "gate and value swapped": lambda z, mask, w, direction, eps: (z, mask, w._replace(a_p=w.a_g, a_g=w.a_p), direction, eps),
    "output gate": lambda z, mask, w, direction, eps: (z, mask, w._replace(gate=-w.gate), direction, eps),
}
ALL_WRONG = [(ATTENTION, name, wrong) for name, wrong in WRONG.items()] + [
    (MULTIPLICATION, name, wrong) for name, wrong in WRONG_MULTIPLICATION.items()
]


@pytest.mark.parametrize(("operator", "wrong"), [pytest.param(o, w, id=f"{o}, {name}") for o, name, w in ALL_WRONG])
def test_a_wrong_kernel_is_noticed(plugged, run, stock_run, monkeypatch, operator, wrong):
    from turbopair import openfold3_layers

    right = getattr(openfold3_layers, operator)
    monkeypatch.setattr(openfold3_layers, operator, lambda *args, **options: right(*wrong(*args), **options))
    result = run(plugged[0])
    assert difference(stock_run[1], result[1], "tri_att" if operator == ATTENTION else "tri_mul") > 1000 * TOLERANCE
    assert not agrees(stock_run, result)


def test_bf16_autocast_is_no_worse_than_stock(stock, plugged, run, stock_run):
    (loss, theirs), (own_loss, own) = run(stock, bf16=True), run(plugged[0], bf16=True)
    for part in PARTS:
        assert difference(stock_run[1], own, part) < MODEL_FACTOR * difference(stock_run[1], theirs, part) < 0.1
    assert abs(own_loss - stock_run[0]) < 1e-3 * stock_run[0] and abs(loss - stock_run[0]) < 1e-3 * stock_run[0]


def test_two_training_runs_are_bitwise_equal(modules, batch):
    outcomes = []
    for _ in range(2):
        module = modules("pytorch", 0.1)
        model.fix_recycles(module.model, 0)
        installation = model.find_backend("turbopair").plug(module.model)
        step = TrainingStep(module, batch, Ranks(0, 1, torch.device("cpu")))
        model.seed_rank(0, 0)
        steps = [step() for _ in range(2)]  # the first has learning rate 0
        assert not model.not_served(installation)
        outcomes.append(([(s.loss, s.grad_norm) for s in steps], [p.detach().clone() for p in step.model.parameters()], step.module.ema))
    (first, weights, ema), (second, other_weights, other_ema) = outcomes
    assert first == second and first[0] != first[1]
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
    assert ema.params.keys() == other_ema.params.keys() and all(torch.equal(p, other_ema.params[name]) for name, p in ema.params.items())


# ------------------------------------------------------------------------------------------------ single layers


def inputs(*shape, dtype=torch.float32):
    """x [*shape, C] and a mask [1, ..., I, J] with padded tokens: their rows are fully masked."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, generator=generator)
    tokens = torch.ones(shape[-2])
    tokens[-3:] = 0
    mask = (tokens[:, None] * tokens).reshape(*[1] * (len(shape) - 3), shape[-2], shape[-2])
    return x.to(dtype).requires_grad_(), mask.to(dtype)


def update(attention, x, mask, bf16=False, rows=None, **options):
    """Output and the gradients to x and every parameter.

    `rows` limits the output gradient to the real rows (1) or the fully masked ones (0). No loss depends on the latter, and
    OpenFold3 differentiates their scores, which 1e9 has rounded away; turbopair knows that they are constant.
    """
    attention.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        out = attention(x, mask, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    if rows is not None:
        row_mask = mask[..., 0].unsqueeze(-1 if attention.starting else -2).unsqueeze(-1)
        dout = dout * (row_mask == rows)
    out.backward(dout)
    return {"out": out.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in attention.named_parameters()}}


@pytest.mark.parametrize("options", [{}, {"transpose_bias": True}, {"starting": False}], ids=["start", "end", "ending node"])
@pytest.mark.parametrize("shape", [(1, 9, 9, 32), (1, 2, 9, 9, 32)], ids=["pair", "templates"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_layer_agrees_with_stock(layer, shape, options, masked):
    options = dict(options)
    attention = layer(starting=options.pop("starting", True))
    x, mask = inputs(*shape)
    options |= {"mask": mask, "rows": 1} if masked else {"mask": None}
    expected = update(attention, x, **options)
    with install(attention, strict=True) as installation:
        actual = update(attention, x, **options)
        assert [(row.calls, row.stock_calls) for row in installation.report()] == [(1, 0)]
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5 * value.abs().max().item())


def test_fully_masked_rows_have_an_output_and_no_gradient_but_to_v(layer):
    attention = layer()
    x, mask = inputs(1, 9, 9, 32)
    stock = update(attention, x, mask)
    install(attention, strict=True)
    own = update(attention, x, mask, rows=0)
    torch.testing.assert_close(own["out"], stock["out"], rtol=1e-4, atol=1e-5)
    zero = {name for name, gradient in own.items() if not gradient.any()}
    assert zero == {"linear_z.weight", "mha.linear_q.weight", "mha.linear_k.weight"}


@pytest.mark.parametrize("precision", ["plain", None, "exact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bf16_layer_is_no_worse_than_stock_against_fp64(layer, dtype, precision):
    attention = layer()
    x, mask = inputs(1, 24, 24, 32, dtype=dtype)
    expected = update(copy.deepcopy(attention).double(), x.double(), mask.double(), rows=1)
    stock = update(attention, x, mask, bf16=True, rows=1)
    install(attention, strict=True, precision=precision)
    own = update(attention, x, mask, bf16=True, rows=1)
    assert {name: t.dtype for name, t in own.items()} == {name: t.dtype for name, t in stock.items()}
    assert own["out"].dtype == torch.bfloat16 and own["x"].dtype == dtype and own["linear_z.weight"].dtype == torch.float32
    for result in (expected, stock, own):
        result["out"] = result["out"][mask[..., 0] == 1]  # fp64 resolves scores beside 1e9
    assert max(difference({name: expected[name]}, {name: own[name]}) for name in expected) < 0.02
    for together in (["out"], ["x"], [name for name in expected if name not in ("out", "x")]):
        pick = [{name: result[name] for name in together} for result in (expected, own, stock)]
        assert difference(pick[0], pick[1]) < LAYER_FACTOR * difference(pick[0], pick[2]), together


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
def test_inference_in_chunks(layer, transpose, bf16):
    attention = layer()
    x, mask = inputs(1, 2, 9, 9, 32)
    options = {"transpose_bias": transpose, "use_lma": True}
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        expected = attention(x, mask, transpose_bias=transpose)
        installation = install(attention, strict=True)
        before = x.clone()
        for result in (
            attention(x, mask, **options),
            attention(x, mask, chunk_size=4, **options),
            attention(x, mask, chunk_size=4, inplace_safe=True, **options),
            attention(x, mask, chunk_size=100, inplace_safe=True, **options),
        ):
            assert result.dtype == expected.dtype
            torch.testing.assert_close(result, expected, **({"rtol": 0.05, "atol": 0.02} if bf16 else {"rtol": 1e-4, "atol": 1e-5}))
    assert torch.equal(x, before) and installation.report()[0].stock_calls == 0


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_the_same(layer, monkeypatch, reentrant, served):
    """Under autocast with its weight cache: the question asked at the first call must neither be saved nor fill the cache."""
    from turbopair import openfold3_layers

    attention = layer()
    x, mask = inputs(1, 9, 9, 32)
    if not served:
        monkeypatch.setattr(openfold3_layers, "supports", lambda *args, **options: "not today")
    installation = install(attention)
    results = []
    for call in (attention, lambda x, mask: checkpoint(attention, x, mask, use_reentrant=reentrant)):
        installation.remove()
        installation = install(attention)
        attention.zero_grad()
        with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
            warnings.filterwarnings("ignore", message=".*not today")
            out = call(x, mask)
        out.float().square().sum().backward()
        results.append([p.grad.clone() for p in attention.parameters()])
    row = installation.report()[0]
    assert (row.calls, row.stock_calls) == ((2, 0) if served else (0, 2))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*results, strict=True))


def test_names_copies_and_pickles_and_removal(stock, plugged, run, stock_run):
    module, installation = plugged
    site = "pairformer_stack.blocks.0.pair_stack.tri_att_end"
    assert list(module.state_dict()) == list(stock.state_dict())
    assert [name for name, _ in module.named_modules()] == [name for name, _ in stock.named_modules()]
    module.load_state_dict(stock.state_dict())
    original, served = stock.model.get_submodule(site), module.model.get_submodule(site)
    assert isinstance(served, type(original)) and type(served) is not type(original)

    x, mask = inputs(1, 9, 9, 128)
    expected = update(served, x, mask)
    for twin in (copy.deepcopy(served), pickle.loads(pickle.dumps(served))):
        assert type(twin) is type(served)
        assert all(torch.equal(a, b) for a, b in zip(update(twin, x, mask).values(), expected.values(), strict=True))
        assert twin._turbopair.calls == 1  # its own
        assert uninstall(twin) == 1 and uninstall(twin) == 0
        assert type(twin) is type(original)
    rows = {row.site: row for row in installation.report()}
    assert rows[site].calls == 1 and type(served) is not type(original)

    installation.remove()
    installation.remove()
    attributes = [[set(m.__dict__) for m in each.model.modules()] for each in (module, stock)]
    assert [type(m) for m in module.model.modules()] == [type(m) for m in stock.model.modules()]
    assert attributes[0] == attributes[1]
    loss, restored = run(module)
    assert loss == stock_run[0] and all(torch.equal(restored[name], stock_run[1][name]) for name in restored)


def test_what_cannot_be_served_is_said_once_and_runs_stock(layer):
    attention = layer()
    x, mask = inputs(1, 9, 9, 32)
    sites = torch.nn.ModuleDict({"first": attention, "second": copy.deepcopy(attention)})
    installation = install(sites)
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
        with pytest.warns(UserWarning) as caught:
            results = [sites[name](x, mask) for name in ("first", "first", "second")]
        expected = [super(type(attention), attention).forward(x, mask)] * 3
    own = [str(w.message) for w in caught if "turbopair" in str(w.message)]
    assert len(own) == 1 and "does not serve first, OpenFold3's own code runs: q has dtype torch.float16; accepted: " in own[0]
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=0, atol=0, equal_nan=True)  # 1e9 overflows in fp16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sites["second"](x, mask)
    rows = installation.report()
    assert [(row.site, row.served_by, row.calls, row.stock_calls) for row in rows] == [
        ("first", "stock", 0, 2),
        ("second", "turbopair", 1, 1),
    ]
    assert all("torch.float16" in row.reason for row in rows)
    installation.remove()

    install(sites, strict=True)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(NotServed, match=r"cannot serve first: q has dtype torch\.float16"):
        attention(x, mask)


def test_a_site_that_can_never_be_served_is_left_alone(layer):
    class Other(type(layer())):
        pass

    other = layer()
    other.__class__ = Other
    sites = torch.nn.ModuleDict({"wide": layer(head_dim=72), "fits": layer(), "other": other})
    with pytest.raises(NotServed, match="cannot serve wide: D is 72"):
        install(sites, strict=True)
    with pytest.raises(NotServed, match="cannot serve the module itself: D is 72"):
        install(sites["wide"], strict=True)
    assert uninstall(sites) == 0
    with pytest.warns(UserWarning) as caught:
        installation = install(sites)
    assert [str(w.message).split(",")[0] for w in caught] == ["turbopair does not serve wide", "turbopair does not serve other"]
    wide, fits, rest = installation.report()
    assert wide[:3] == ("wide", ATTENTION, "stock") and wide.stock_calls is None and "up to 64" in wide.reason
    assert fits[:4] == ("fits", ATTENTION, "turbopair", None) and "Other is derived from TriangleAttention" in rest.reason
    assert "serves 1 of 3" in str(installation)


def test_install_refuses_with_a_reason(layer, monkeypatch):
    attention = layer()
    with pytest.raises(ValueError, match=r"precision is 'papr' \(did you mean 'paper'"):
        install(attention, precision="papr")
    with pytest.raises(ValueError, match="this Linear has no TriangleAttention or TriangleMultiplicativeUpdate of openfold3"):
        install(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="this TriangleAttention has no TriangleMultiplicativeUpdate of openfold3"):
        install(attention, attention=False)
    with pytest.raises(ValueError, match="neither attention nor multiplication is asked for"):
        install(attention, attention=False, multiplication=False)
    with install(attention) as handle, pytest.raises(ValueError, match=r"installed in this model already \(site\)"):
        install(torch.nn.ModuleDict({"site": attention}))
    assert str(handle).startswith("removed; until then:\nturbopair serves 1 of 1")
    assert uninstall(attention) == 0
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(ImportError, match=r"openfold3 0\.6\.0 is installed; .* tested with 0\.5\.0"):
        install(attention)


def test_a_missing_openfold3_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"needs openfold3 0\.5\.0, which is not installed"):
        turbopair.openfold3.install(torch.nn.Linear(2, 2))


def test_importing_the_door_does_not_import_openfold3():
    code = "import sys, turbopair.openfold3; sys.exit('openfold3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "kernels"}, check=False).returncode == 0


# ------------------------------------------------------------------------------------------------ the step-time experiment


def test_a_step_not_served_throughout_is_refused(layer, monkeypatch):
    attention = layer()
    installation = model.find_backend("turbopair_attention").plug(attention)
    assert model.not_served(installation) == [""]  # not called
    attention(*inputs(1, 9, 9, 32))
    assert model.not_served(installation) == []
    attention._turbopair.stock_calls = 1
    assert model.not_served(installation) == [""]


@pytest.mark.parametrize("backend", ["turbopair", "turbopair_attention"])
def test_the_experiment_measures_turbopair(openfold3, backend):
    from tests.cpu.openfold.test_step import cell

    metrics = step_time.run(cell(backend), torch.device("cpu"))
    assert metrics["backend_calls"] == 32 and metrics["loss"] > 0 and metrics["grad_norm"] > 0
    assert metrics["dtype.attention"] == metrics["dtype.bias"] == "bfloat16"
