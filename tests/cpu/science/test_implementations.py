import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_cells import CPU, make_cell

from pipeline import config, implementations
from pipeline.experiments import accuracy, shared
from pipeline.implementations import NotInstalled, Unsupported, base
from pipeline.inputs import Case
from pipeline.loading import ConfigError

ON_CPU = ["eager", "sdpa", "lma", "turbopair.plain", "turbopair.paper", "turbopair.split_p", "turbopair.exact"]
FAMILIES = ["normal", "peaked", "sharp", "offset", "masked", "openfold"]
#: Allowed RMSE over that of plain PyTorch in bf16, on random inputs and on captured ones. LMA adds roundings of its own
#: (it exponentiates in bf16). Without the output residual, rowsum(dout * out) takes the rounding of out; on captured
#: inputs, whose output is far from zero, that shows in dq.
FACTOR = {"lma": (4.0, 12.0), "turbopair.plain": (1.02, 4.0)}
GRADIENTS = ("dq", "dk", "dv", "dbias")
Tensor = torch.Tensor


def errors(implementation: str, **fields: object) -> dict[str, accuracy.Error]:
    cell = make_cell(implementation=implementation, **fields)
    return accuracy.compare(shared.results(shared.bind(cell, CPU)), shared.reference_for(shared.case_of(cell), CPU))


def test_every_name_of_the_comparison_is_registered() -> None:
    peers = {"flex", "flex_fp32bias", "openfold3_triton", "trifast", "deepspeed", "cuequivariance", "cuequivariance_fp32bias"}
    peers |= {"turbopairformer", "megafold", "miniworld_engine"}
    assert {*ON_CPU, *peers} <= set(implementations.names())
    with pytest.raises(LookupError, match="no implementation 'egaer' of triangle_attention; known are"):
        implementations.get("egaer")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bias_dtype", ["bf16", "fp32"])
def test_error_is_no_larger_than_that_of_plain_bf16(family: str, bias_dtype: str) -> None:
    plain = errors("eager", family=family, bias_dtype=bias_dtype)
    accuracy.refuse_wrong(plain)
    for name in ON_CPU:
        if name == "lma":
            pytest.importorskip("openfold3")
        for tensor, error in errors(name, family=family, bias_dtype=bias_dtype).items():
            assert error.reference_rms > 100 * error.floor, "the gradient must stand far above the rounding that is judged"
            factor = FACTOR.get(name, (1.02, 1.02))[family == "openfold"]
            assert error.rmse <= factor * plain[tensor].rmse, (name, tensor)


@pytest.mark.parametrize("slices", [1, 5])
def test_slices_need_not_equal_tokens(slices: int) -> None:
    for name in ("eager", "sdpa", "turbopair.paper"):
        accuracy.refuse_wrong(errors(name, slices=slices, n=17))


@pytest.mark.parametrize("name", ["eager", "sdpa", "turbopair.exact"])
def test_fp32_inputs(name: str) -> None:
    assert all(error.relative_rmse < 1e-5 for error in errors(name, dtype="fp32", bias_dtype="fp32", masked=True).values())


def test_forward_without_grad_needs_no_grad_anywhere() -> None:
    seen = []
    bound = shared.bind(make_cell(), CPU)
    call = bound.call
    bound.call = lambda *tensors: (seen.append([t.requires_grad for t in tensors]), call(*tensors))[1]
    assert not bound.forward(grad=False).requires_grad
    assert bound.forward(grad=True).requires_grad
    assert seen == [[False] * 4, [True] * 4]


class Mutant(base.Implementation):
    """Plain PyTorch with a fault: the checks must notice each of them."""

    def __init__(self, fault: str) -> None:
        self.name = self.title = f"mutant.{fault}"
        self.fault = fault

    def limits(self, case: Case, device: torch.device) -> str | None:
        return None

    def bind(self, inputs: object) -> base.Bound:
        bound = implementations.get("eager").bind(inputs)
        good, fault = bound.call, self.fault

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            if fault == "scale":
                q = 1.5 * q
            if fault == "bias":
                bias = 0 * bias
            if fault == "value":
                v = v.roll(1, dims=2)
            out = good(q, k, v, bias)
            return out * float("nan") if fault == "nan" else out

        bound.call = call
        if fault.startswith("zero_"):
            bound.leaves[fault.removeprefix("zero_")].register_hook(torch.zeros_like)
        if fault == "half_dbias":
            bound.leaves["dbias"].register_hook(lambda grad: grad / 2)
        return bound


@pytest.mark.parametrize("fault", ["scale", "bias", "value", "nan", "half_dbias", *(f"zero_{name}" for name in GRADIENTS)])
def test_a_wrong_implementation_is_caught(fault: str, temporary: Callable[[base.Implementation], str]) -> None:
    with pytest.raises(accuracy.WrongResult):
        accuracy.refuse_wrong(errors(temporary(Mutant(fault))))


def test_a_reference_without_scale_is_refused() -> None:
    zero = torch.zeros(4, 4, dtype=torch.float64)
    with pytest.raises(accuracy.WrongResult, match="would say nothing"):
        accuracy.error_of("dq", zero.bfloat16(), zero)


def test_an_error_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    true = torch.randn(50, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = (true + 0.01).bfloat16()
    difference, rounding = found.double() - true, true.bfloat16().double() - true
    expected = (difference.square().mean().sqrt(), difference.abs().max(), rounding.square().mean().sqrt(), true.square().mean().sqrt())
    for size in (1, 8 * 3 * 8 * 7, 1 << 28):  # a row, seven rows, everything
        monkeypatch.setattr(accuracy, "_PART_BYTES", size)
        error = accuracy.error_of("dq", found, true)
        assert (error.rmse, error.max_error, error.floor, error.reference_rms) == pytest.approx([float(x) for x in expected], rel=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 20, 49])
def test_values_that_are_not_finite_are_counted(value: float, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_PART_BYTES", 8 * 4 * 7)
    good, bad = torch.ones(50, 4), torch.ones(50, 4)
    bad[row, 1:3] = value
    reference = dict.fromkeys(("out", "dq"), good.double())
    with pytest.raises(accuracy.WrongResult, match=r"dq is non-finite .* in 2 of 200 values"):
        accuracy.compare({"out": good, "dq": bad}, reference)
    with pytest.raises(accuracy.WrongResult, match=r"dq has shape \(4, 50\); the reference has \(50, 4\)"):
        accuracy.compare({"out": good, "dq": good.T}, reference)


@pytest.mark.parametrize("name", ["trifast", "turbopairformer", "cuequivariance", "deepspeed"])
def test_a_missing_peer_names_its_package(name: str) -> None:
    peer = implementations.get(name)
    package = {"cuequivariance": "cuequivariance-torch"}.get(name, name)
    try:
        peer.version()
    except NotInstalled as reason:
        assert f"pip install {package}" in str(reason)
    else:
        assert "GPU" in str(peer.supports(Case(128, 128, 4, 32), CPU))


def test_flex_says_why_not_on_cpu() -> None:
    with pytest.raises(Unsupported, match="no backward on CPU"):
        shared.bind(make_cell(implementation="flex"), CPU)


def test_flex_really_has_no_backward_on_cpu() -> None:
    """The reason above is true of the installed PyTorch: if this fails, remove the refusal."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 16, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(q, q, q)


def test_a_broken_import_carries_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = implementations.get("trifast")
    monkeypatch.setattr(type(peer), "version", lambda self: "0.1.13")
    monkeypatch.setitem(sys.modules, "trifast", None)
    with pytest.raises(NotInstalled, match=r"trifast 0\.1\.13 is installed but trifast cannot be imported: ModuleNotFoundError") as caught:
        peer.module("trifast")
    assert isinstance(caught.value.__cause__, ImportError)


def test_a_peer_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: object) -> None:
    (tmp_path / "my_peer.py").write_text(
        "from pipeline.implementations import get, register\n@register\nclass Mine(type(get('eager'))):\n    name = 'mine'\n"
    )
    file = tmp_path / "config.yaml"
    file.write_text("name: t\nplugins: [my_peer]\naccuracy: {implementations: [mine]}\n")
    with pytest.raises(ConfigError, match="'my_peer' cannot be imported: No module named 'my_peer'"):
        config.load(file)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert config.load(file).plugins == ["my_peer"]
    assert "mine" in implementations.names()
    accuracy.refuse_wrong(errors("mine"))


def test_a_name_is_taken_once(temporary: Callable[[base.Implementation], str]) -> None:
    thief = Mutant("nan")
    thief.name = "eager"
    with pytest.raises(ValueError, match="two implementations have the name 'eager'"):
        temporary(thief)


@pytest.mark.parametrize("name", ["my-kernel", "a b", "", "mine\n"])
def test_a_name_fits_into_a_file_name(name: str, temporary: Callable[[base.Implementation], str]) -> None:
    peer = Mutant("nan")
    peer.name = name
    with pytest.raises(ConfigError, match=r"Mutant'>: name = '.*' is not accepted; a name is of letters, digits, '_', '\.' and '\+'"):
        temporary(peer)


# Peers that need a GPU, checked through stand-ins that follow the documented contract of each: layouts, the meaning of
# the mask and the order of arguments. The stand-ins avoid PyTorch's softmax, which would count as a fallback.


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """``[..., H, N, D]`` with a bias that broadcasts to ``[..., H, N, N]``, through element-wise operators only."""
    logits = (q.float()[..., :, None, :] * k.float()[..., None, :, :]).sum(-1) * scale + bias.float()
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights[..., None] * v.float()[..., None, :, :]).sum(-2).to(q.dtype)


def trifast_like(q: Tensor, k: Tensor, v: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    batch, heads, rows, n, _ = q.shape  # [b, h, n, n, d]
    assert rows == n and b.shape == (batch, heads, n, n) and mask.shape == (batch, n, n) and mask.dtype == torch.bool
    return attend(q, k, v, b[:, :, None].masked_fill(mask[:, None, :, None, :], -1e30), q.shape[-1] ** -0.5)


def cuequivariance_like(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    batch, rows, heads, n, _ = q.shape
    assert bias.shape == (batch, 1, heads, n, n) and scale is not None
    if mask is not None:
        assert mask.shape == (batch, rows, 1, 1, n) and mask.dtype == torch.bool
        bias = bias.float().masked_fill(~mask, -1e30)
    return attend(q, k, v, bias, scale)


def evoformer_like(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor, has_bias: bool = True) -> Tensor:
    batch, rows, n, heads, _ = q.shape
    assert bias.shape == (batch, 1, heads, n, n) and has_bias
    if mask is not None:
        assert mask.shape == (batch, rows, 1, 1, n)
        bias = bias.float() + mask.float()
    q, k, v = (tensor.transpose(-2, -3) for tensor in (q, k, v))
    return attend(q, k, v, bias, q.shape[-1] ** -0.5).transpose(-2, -3)


def deepspeed_like(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor | None]) -> Tensor:
    mask, bias = biases
    assert bias is not None
    return evoformer_like(q, k, v, mask, bias)


def turbo_like(q: Tensor, k: Tensor, v: Tensor, res_mask: Tensor | None = None, pair_bias: Tensor | None = None) -> Tensor:
    assert pair_bias is not None and pair_bias.shape == (q.shape[0], 1, q.shape[2], q.shape[3], q.shape[3])
    if res_mask is not None:
        assert res_mask.dtype == torch.float32 and set(res_mask.unique().tolist()) == {0.0, float("-inf")}
        pair_bias = pair_bias.float() + res_mask.clamp_min(-1e30)
    return attend(q, k, v, pair_bias, q.shape[-1] ** -0.5).transpose(-2, -3)


STAND_INS = {
    "trifast": ("trifast", "triangle_attention", trifast_like),
    "cuequivariance": ("cuequivariance_torch", "triangle_attention", cuequivariance_like),
    "openfold3_triton": ("openfold3.core.kernels.triton.evoformer", "TritonEvoformer", evoformer_like),
    "megafold": ("evoformer", "TritonEvoformer", evoformer_like),
    "deepspeed": ("deepspeed.ops.deepspeed4science", "DS4Sci_EvoformerAttention", deepspeed_like),
    "turbopairformer": ("turbopairformer", "turbo_attention", turbo_like),
}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Tensor] | None = None) -> base.Implementation:
    module, attribute, own = STAND_INS[name]
    peer = implementations.get(name)
    fake = types.SimpleNamespace(**{attribute: function or own})
    monkeypatch.setattr(type(peer), "module", lambda self, wanted: {module: fake}[wanted])
    return peer


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("family", ["normal", "masked"])
def test_layouts_and_masks_of_the_gpu_peers(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(n=24, slices=24, heads=2, head_dim=8, family=family)
    bound = stand_in(monkeypatch, name).bind(shared.inputs_for(case, CPU))
    found = accuracy.compare(shared.results(bound), shared.reference_for(case, CPU))
    assert max(error.relative_rmse for error in found.values()) < 0.01


@pytest.mark.parametrize("there", [("evoformer",), ("evoattention",), ("evoformer", "evoattention")])
def test_megafold_is_found_under_both_names_of_its_module(there: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    peer, inputs = implementations.get("megafold"), shared.inputs_for(Case(n=16, slices=4, heads=2, head_dim=8), CPU)
    asked: list[str] = []

    def module(self: base.Implementation, name: str) -> types.SimpleNamespace:
        asked.append(name)
        return types.SimpleNamespace(TritonEvoformer=evoformer_like)

    monkeypatch.setattr("pipeline.implementations.megafold._importable", lambda name: name in there)
    monkeypatch.setattr(type(peer), "module", module)
    assert peer.version() == "unversioned"
    assert peer.bind(inputs).forward(grad=False).shape == inputs.q[None].shape
    assert asked == [there[-1]]  # the newer name where both are


def test_silent_fallback_of_a_peer_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def falls_back(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) + bias, dim=-1) @ v

    peer = stand_in(monkeypatch, "cuequivariance", falls_back)
    with pytest.raises(Unsupported, match="fell back to PyTorch"):
        peer.bind(shared.inputs_for(Case(n=16, slices=4, heads=2, head_dim=8), CPU))


def test_documented_limits_of_the_gpu_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")

    def reason(name: str, **fields: object) -> str:
        settings: dict[str, object] = {"n": 128, "slices": 128, "heads": 4, "head_dim": 32, **fields}
        return implementations.get(name).limits(Case(**settings), gpu) or ""

    threshold = types.SimpleNamespace(CUEQ_TRIATTN_FALLBACK_THRESHOLD=100)
    monkeypatch.setattr(type(implementations.get("cuequivariance")), "module", lambda self, name: threshold)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert reason("cuequivariance") == ""
    assert "up to 100 tokens" in reason("cuequivariance", n=100)
    assert "D is 20" in reason("cuequivariance", head_dim=20)
    assert "TF32" in reason("cuequivariance", dtype="fp32", bias_dtype="fp32")
    assert "as many slices as tokens" in reason("trifast", slices=64)
    assert "more than 16 tokens" in reason("deepspeed", n=16)
    assert "head dimension 64" in reason("deepspeed", head_dim=128)
    assert "above 16 tokens" in reason("openfold3_triton", n=16)
    assert reason("turbopairformer") == "" and "1 to 64" in reason("turbopairformer", head_dim=72)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "compute capability 9.0" in reason("turbopairformer")
