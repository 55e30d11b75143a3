"""Triangle multiplication and the attention module: inputs, FP64 references, implementations, and the experiments on them."""

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_cells import CPU

from pipeline import implementations, pair_inputs, pair_reference
from pipeline.cells import Cell
from pipeline.experiments import accuracy, execute, shared
from pipeline.implementations import Unsupported, base
from pipeline.implementations.multiplication.eager import formula
from pipeline.pair_inputs import ModuleCase, MultiplicationCase, PairInputs, make
from pipeline.records import Record, Status
from pipeline.tensors import MODULE, MULTIPLICATION, MULTIPLICATION_WEIGHTS, RESULTS

Tensor = torch.Tensor
VARIANTS = [
    (direction, dtype, family) for direction in ("outgoing", "incoming") for dtype in ("fp32", "bf16") for family in ("normal", "masked")
]


def product(**fields: object) -> MultiplicationCase:
    return MultiplicationCase(**{"n": 20, "channels": 32, "seed": 3, **fields})


def module(**fields: object) -> ModuleCase:
    return ModuleCase(**{"n": 20, "channels": 32, "heads": 2, "head_dim": 16, "seed": 3, **fields})


def cell(operator: str, implementation: str, experiment: str = "accuracy", **fields: object) -> Cell:
    own = {"direction": "outgoing", "weight_dtype": "fp32"} if operator == MULTIPLICATION else {"heads": 2, "head_dim": 16}
    common = {"n": 20, "channels": 32, "family": "normal", "seed": 3}
    return Cell(experiment=experiment, implementation=implementation, operator=operator, **{**common, **own, **fields})


def errors(given: Cell) -> dict[str, accuracy.Error]:
    return accuracy.compare(shared.results(shared.bind(given, CPU)), shared.reference_for(shared.case_of(given), CPU))


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_shapes_dtypes_and_draws() -> None:
    made, other = make(product(weight_dtype="bf16")), make(product(direction="incoming"))
    assert made.z.shape == made.dout.shape == (20, 20, 32) and made.z.dtype == torch.bfloat16 and made.mask is None
    assert tuple(made.weights) == MULTIPLICATION_WEIGHTS and made.weights["a_p"].dtype == torch.bfloat16
    assert torch.equal(made.z, other.z) and torch.equal(made.weights["gate"], other.weights["gate"].bfloat16())
    assert not torch.equal(other.weights["gate"], other.weights["gate"].bfloat16().float()), "masters have values of their own"
    shapes = {name: tuple(weight.shape) for name, weight in make(module(heads=4)).weights.items()}
    assert (shapes["bias"], shapes["q"], shapes["out"], shapes["norm_bias"]) == ((4, 32), (64, 32), (32, 64), (32,))


# The bits are part of the contract: records of two machines are compared only because their inputs are the same.
def test_the_draws_never_change() -> None:
    assert make(product()).z[0, 0, :4].tolist() == [-1.015625, -0.11279296875, 1.90625, -0.228515625]
    assert make(module()).weights["q"][0, :2].tolist() == pytest.approx([0.253803014755249, -0.023091914132237434], rel=1e-7)


def test_padding_is_of_tokens_and_its_cotangent_is_zero() -> None:
    made = make(product(family="masked"))
    assert made.mask is not None
    keep = torch.arange(20) < 18  # an eighth of 20, rounded down
    assert torch.equal(made.mask, keep[:, None] & keep[None, :])
    assert not made.dout[~made.mask].any() and made.dout[made.mask].any() and made.z[~made.mask].any()
    assert make(product(n=1, family="masked")).mask.all()


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        (product, {"family": "peaked"}, "family is 'peaked'; accepted are normal, masked"),
        (product, {"direction": "up"}, "direction is 'up'; accepted are outgoing, incoming"),
        (module, {"heads": 0}, "heads is 0; it must be at least 1"),
        (product, {"n": 0}, "n is 0"),
    ],
)
def test_a_wrong_case_is_refused(case: Callable[..., object], fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        case(**fields)


# --- references ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_the_product_is_over_the_third_index(direction: str) -> None:
    """Against the definition, element by element, with the package's own weights."""
    given = make(product(n=5, family="masked", direction=direction))
    w = {name: weight.double() for name, weight in given.weights.items()}
    z = given.z.double()
    zn = torch.nn.functional.layer_norm(z, (32,), w["norm_in_weight"], w["norm_in_bias"], pair_inputs.EPS)
    a, b = (((zn @ w[f"{s}_g"].T).sigmoid() * (zn @ w[f"{s}_p"].T)) * given.mask[..., None] for s in "ab")
    x = torch.zeros(5, 5, 32, dtype=torch.float64)
    for i in range(5):
        for j in range(5):
            for k in range(5):
                x[i, j] += a[i, k] * b[j, k] if direction == "outgoing" else a[k, i] * b[k, j]
    x = torch.nn.functional.layer_norm(x, (32,), w["norm_out_weight"], w["norm_out_bias"], pair_inputs.EPS)
    torch.testing.assert_close(pair_reference.multiplication(given)["out"], (zn @ w["gate"].T).sigmoid() * (x @ w["out"].T))


@pytest.mark.parametrize("operator", [MULTIPLICATION, MODULE])
def test_gradients_are_those_of_the_output(operator: str) -> None:
    """Along a random direction of all inputs, against central differences in FP64."""
    case, function = (
        (product(n=6), pair_reference.multiplication) if operator == MULTIPLICATION else (module(n=6), pair_reference.attention_module)
    )
    given = make(case)
    true = function(given)
    generator = torch.Generator().manual_seed(0)

    def moved(amount: float) -> float:
        generator.manual_seed(0)

        def move(tensor: Tensor) -> Tensor:
            return tensor.double() + amount * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

        z, weights = move(given.z), {name: move(weight) for name, weight in given.weights.items()}
        return float((function(PairInputs(case, z, given.dout, None, weights))["out"] * given.dout.double()).sum())

    generator.manual_seed(0)
    steps = {"dz": given.z, **{f"dw_{name}": weight for name, weight in given.weights.items()}}
    expected = sum(
        float((true[name] * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)).sum()) for name, tensor in steps.items()
    )
    step = 1e-5
    assert (moved(step) - moved(-step)) / (2 * step) == pytest.approx(expected, rel=1e-6)


def test_the_module_is_openfold3s() -> None:
    """OpenFold3's own class in FP64 gives the reference: output, dz and every weight gradient, with padding."""
    pytest.importorskip("openfold3")
    given = make(module(family="masked"))
    exact = PairInputs(given.case, given.z.double(), given.dout.double(), given.mask, given.weights)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*autocast.*", category=UserWarning)
        found = in_double(exact)
    for name, true in pair_reference.attention_module(given).items():
        # In FP64 -1e9 does not swallow the logits: OpenFold3's rows of padding are not the mean of v, as they are in its own dtypes.
        rows = 18 if name == "out" else None
        assert accuracy.error_of(name, found[name][:rows], true[:rows]).relative_rmse < 1e-9, name


def in_double(given: PairInputs) -> dict[str, Tensor]:
    from openfold3.core.model.layers.triangular_attention import TriangleAttention

    from pipeline.implementations.module.base import PARAMETERS

    layer = TriangleAttention(given.case.channels, given.case.head_dim, given.case.heads).double()
    parameters = dict(layer.named_parameters())
    with torch.no_grad():
        for name, weight in given.weights.items():
            parameters[PARAMETERS[name]].copy_(weight)
    z = given.z[None].requires_grad_()
    out = layer(z, None if given.mask is None else given.mask[None].double())
    out.backward(given.dout[None])
    assert z.grad is not None
    return {"out": out[0].detach(), "dz": z.grad[0], **{f"dw_{name}": parameters[PARAMETERS[name]].grad for name in given.weights}}


# --- implementations -------------------------------------------------------------------------------------------------


def test_every_name_of_the_comparison_is_registered() -> None:
    assert implementations.names(MULTIPLICATION) == [
        "compiled",
        "cuequivariance",
        "eager",
        "miniworld_engine",
        "turbopair",
        "turbopairformer",
    ]
    assert implementations.names(MODULE) == ["cuequivariance", "flex", "miniworld_engine", "openfold3", "turbopair"]


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("masked", [False, True])
def test_eager_is_openfold3s_layer_bit_by_bit(direction: str, masked: bool) -> None:
    layers = pytest.importorskip("openfold3.core.model.layers.triangular_multiplicative_update")
    given = make(product(direction=direction, family="masked" if masked else "normal"))
    layer = layers.TriangleMultiplicativeUpdate(32, 32, _outgoing=direction == "outgoing")
    of = {"norm_in": "layer_norm_in", "norm_out": "layer_norm_out", "out": "linear_z", "gate": "linear_g"}
    parameters = dict(layer.named_parameters())
    with torch.no_grad():
        for name, weight in given.weights.items():
            owner, _, kind = name.rpartition("_") if name.startswith("norm") else (name, "", "weight")
            parameters[f"{of.get(owner, f'linear_{owner}')}.{kind}"].copy_(weight)
    mask = torch.ones_like(given.z[..., 0]) if given.mask is None else given.mask.bfloat16()
    z = given.z[None].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(z, mask[None])
    out.backward(given.dout[None])
    found = shared.results(implementations.get("eager", MULTIPLICATION).bind(given))
    assert torch.equal(found["out"], out[0]) and z.grad is not None
    # sums of gradients that meet at one tensor may be taken in another order
    assert accuracy.error_of("dz", found["dz"], z.grad[0].double()).relative_rmse < 2e-3
    assert accuracy.error_of("dw", found["dw_a_g"], parameters["linear_a_g.weight"].grad.double()).relative_rmse < 2e-3


@pytest.mark.parametrize(("direction", "dtype", "family"), VARIANTS)
def test_our_multiplication_is_at_least_as_exact_as_plain_bf16(direction: str, dtype: str, family: str) -> None:
    fields = {"direction": direction, "weight_dtype": dtype, "family": family}
    plain, own = (errors(cell(MULTIPLICATION, name, **fields)) for name in ("eager", "turbopair"))
    accuracy.refuse_wrong(plain)
    for name in ("out", "dz"):
        assert own[name].rmse <= plain[name].rmse, name
    worst = max(own[name].relative_rmse / plain[name].relative_rmse for name in own)
    assert worst < 2, worst


@pytest.mark.parametrize("family", ["normal", "masked"])
def test_our_module_is_at_least_as_exact_as_openfold3s(family: str) -> None:
    pytest.importorskip("openfold3")
    plain, own = (errors(cell(MODULE, name, family=family)) for name in ("openfold3", "turbopair"))
    accuracy.refuse_wrong(plain)
    for name in ("out", "dz"):
        assert own[name].rmse <= plain[name].rmse, name


def test_a_module_without_openfold3_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    for name in ("openfold3", "flex", "turbopair", "cuequivariance"):
        record = execute(cell(MODULE, name), CPU)
        assert record.status is Status.NOT_INSTALLED and "openfold3 is not installed" in str(record.reason), name


@pytest.mark.parametrize(
    ("operator", "name", "words"),
    [
        (MULTIPLICATION, "compiled", "compared on GPUs"),
        (MULTIPLICATION, "cuequivariance", "pip install cuequivariance-torch"),
        (MULTIPLICATION, "turbopairformer", "pip install turbopairformer"),
        (MULTIPLICATION, "miniworld_engine", "pip install miniworld-engine"),
        (MODULE, "flex", "no backward on CPU"),
        (MODULE, "miniworld_engine", "pip install miniworld-engine"),
    ],
)
def test_what_is_absent_has_a_reason(operator: str, name: str, words: str) -> None:
    record = execute(cell(operator, name), CPU)
    assert record.status in (Status.NOT_INSTALLED, Status.UNSUPPORTED)
    assert words in str(record.reason) or "needs an NVIDIA GPU" in str(record.reason) or "openfold3" in str(record.reason)


class Odd(base.Implementation):
    """Plain PyTorch with a fault in one result."""

    operator = MULTIPLICATION

    def __init__(self, fault: str) -> None:
        self.name = self.title = f"odd.{fault}"
        self.fault = fault

    def limits(self, case: MultiplicationCase, device: torch.device) -> str | None:
        return None

    def bind(self, inputs: PairInputs) -> base.Bound:
        bound = implementations.get("eager", MULTIPLICATION).bind(inputs)
        if self.fault == "out":
            good = bound.call
            bound.call = lambda *tensors: 1.5 * good(*tensors)
        else:
            bound.leaves[self.fault].register_hook(torch.zeros_like)
        return bound


@pytest.mark.parametrize("fault", ["out", "dz", *(f"dw_{name}" for name in MULTIPLICATION_WEIGHTS)])
def test_a_fault_in_any_result_is_caught(fault: str, temporary: Callable[[base.Implementation], str]) -> None:
    with pytest.raises(accuracy.WrongResult):
        accuracy.refuse_wrong(errors(cell(MULTIPLICATION, temporary(Odd(fault)))))


# Peers that need a GPU, through stand-ins that follow the documented contract of each.


def packed_like(
    x: Tensor, direction: str = "outgoing", mask: Tensor | None = None, *, norm_in_weight: Tensor, norm_in_bias: Tensor,
    p_in_weight: Tensor, g_in_weight: Tensor, norm_out_weight: Tensor, norm_out_bias: Tensor, p_out_weight: Tensor,
    g_out_weight: Tensor, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    batch, n, _, c = x.shape
    assert p_in_weight.shape == g_in_weight.shape == (2 * c, c) and eps == 1e-5
    assert mask is None or mask.shape == (batch, n, n)
    mask = torch.ones(batch, n, n, dtype=x.dtype) if mask is None else mask.to(x.dtype)
    (a_p, b_p), (a_g, b_g) = p_in_weight.chunk(2), g_in_weight.chunk(2)
    weights = (norm_in_weight, norm_in_bias, a_p, a_g, b_p, b_g, norm_out_weight, norm_out_bias, p_out_weight, g_out_weight)
    return formula(x, *weights, mask=mask[..., None], outgoing=direction == "outgoing")


def residual_like(x: Tensor, direction: str, mask: Tensor | None = None, **weights: Tensor) -> Tensor:
    return x + packed_like(x, direction, mask, **weights)


STAND_INS = {
    "cuequivariance": ("cuequivariance_torch", "triangle_multiplicative_update", packed_like),
    "turbopairformer": ("turbopairformer", "turbo_trimul", packed_like),
    "miniworld_engine": ("miniworld_engine.ops", "triangle_multiplicative_update", residual_like),
}


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize(("direction", "family"), [("outgoing", "normal"), ("incoming", "masked")])
def test_packed_weights_and_masks_of_the_peers(name: str, direction: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, attribute, function = STAND_INS[name]
    peer = implementations.get(name, MULTIPLICATION)
    monkeypatch.setattr(type(peer), "module", lambda self, asked: {wanted: types.SimpleNamespace(**{attribute: function})}[asked])
    if name == "cuequivariance":  # the stand-in is PyTorch, which is what the check looks for
        monkeypatch.setattr("pipeline.implementations.multiplication.cuequivariance.FALLBACK", ())
    case = product(direction=direction, family=family)
    given = shared.inputs_for(case, CPU)
    found = accuracy.compare(shared.results(peer.bind(given)), shared.reference_for(case, CPU))
    assert set(found) == set(RESULTS[MULTIPLICATION])
    # bf16 of x + update loses more of the update than bf16 of the update
    assert max(error.relative_rmse for error in found.values()) < 0.02


def test_miniworld_engine_takes_weights_of_one_dtype_with_z() -> None:
    peer = implementations.get("miniworld_engine", MULTIPLICATION)
    assert peer.limits(product(weight_dtype="bf16"), CPU) is None
    reason = peer.limits(product(weight_dtype="fp32"), CPU)
    assert reason == "miniworld-engine takes weights in the dtype of z; the weights are fp32, z is bf16"


class OneDtype(torch.autograd.Function):
    """A product that multiplies what it is given in its backward: bf16 and fp32 together need autocast there, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.to(x.dtype).mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, (grad.flatten(0, -2).mT @ x.flatten(0, -2)).to(weight.dtype)


@pytest.mark.parametrize("weight_dtype", ["fp32", "bf16"])
def test_cuequivariance_has_autocast_in_both_ways_for_fp32_weights(weight_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(x: Tensor, *rest: Any, **weights: Tensor) -> Tensor:
        assert torch.is_autocast_enabled("cpu") == (weight_dtype == "fp32")
        return packed_like(OneDtype.apply(x, torch.eye(x.shape[-1], dtype=weights["p_in_weight"].dtype)), *rest, **weights)

    peer = implementations.get("cuequivariance", MULTIPLICATION)
    monkeypatch.setattr(type(peer), "module", lambda self, name: types.SimpleNamespace(triangle_multiplicative_update=mixed))
    monkeypatch.setattr("pipeline.implementations.multiplication.cuequivariance.FALLBACK", ())
    case = product(weight_dtype=weight_dtype)
    found = accuracy.compare(shared.results(peer.bind(shared.inputs_for(case, CPU))), shared.reference_for(case, CPU))
    assert max(error.relative_rmse for error in found.values()) < 0.05


def test_silent_fallback_of_a_peer_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = implementations.get("cuequivariance", MULTIPLICATION)
    fake = types.SimpleNamespace(triangle_multiplicative_update=packed_like)
    monkeypatch.setattr(type(peer), "module", lambda self, name: fake)
    with pytest.raises(Unsupported, match="fell back to PyTorch"):
        peer.bind(shared.inputs_for(product(), CPU))


def test_documented_limits_of_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def reason(name: str, **fields: object) -> str:
        return implementations.get(name, MULTIPLICATION).limits(product(**{"n": 128, **fields}), gpu) or ""

    assert reason("cuequivariance") == reason("turbopairformer") == ""
    assert "up to 100 tokens" in reason("cuequivariance", n=100)
    assert "multiples of 32" in reason("cuequivariance", channels=48)
    assert "weights in fp32" in reason("turbopairformer", weight_dtype="bf16")
    assert "more than 100 tokens" in reason("turbopairformer", n=100)
    refusal = implementations.get("turbopair", MULTIPLICATION).limits(product(channels=48), CPU)
    assert "48" in str(refusal)


# --- experiments -----------------------------------------------------------------------------------------------------


def checked(record: Record) -> dict[str, object]:
    assert record.status is Status.OK, record.reason
    return dict(record.metrics)


@pytest.mark.parametrize(("operator", "name"), [(MULTIPLICATION, "turbopair"), (MODULE, "turbopair")])
def test_records_of_the_experiments(operator: str, name: str) -> None:
    if operator == MODULE:
        pytest.importorskip("openfold3")
    results = RESULTS[operator]
    found = checked(execute(cell(operator, name), CPU))
    kinds = ("rmse", "rel_rmse", "max_err", "floor", "ratio", "ref_rms")
    assert set(found) == {f"{kind}.{tensor}" for kind in kinds for tensor in results} | {"dtype.dw"}
    assert found["dtype.dw"] == "float32"
    found = checked(execute(cell(operator, name, "determinism", options={"calls": 2}), CPU))
    assert found == {"calls": 2, **{f"bitwise.{tensor}": True for tensor in results}}
    found = checked(execute(cell(operator, name, "kernel_time", options={"warmup_ms": 1, "repeats": 3}), CPU))
    assert {f"ms.{key}" for key in ("forward", "forward_grad", "backward", "both", "yardstick")} <= set(found)
    assert found["peak_bytes.both"] >= found["peak_bytes.forward"] > 0


def test_a_wrong_multiplication_is_not_timed(temporary: Callable[[base.Implementation], str]) -> None:
    record = execute(cell(MULTIPLICATION, temporary(Odd("dz")), "kernel_time", options={"warmup_ms": 1, "repeats": 3}), CPU)
    assert record.status is Status.FAILED and "wrong result, not timed" in str(record.reason)
