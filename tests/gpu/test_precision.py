"""What each precision promises: the documented rounding, the bf16 floor, and no blow-up where the true gradient is tiny."""

import math

import pytest
import torch
from torch import Tensor

import turbopair
from tests.gpu import checks
from tests.support import numerics
from tests.support.numerics import Case
from turbopair.triangle_attention import emulation

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
FAMILIES = ("normal", "peaked", "sharp", "offset", "masked")


def family_inputs(family: str, case: Case, device: torch.device) -> checks.Data:
    """Named input families: peaked bias x4, sharp q and k x3, v offset by 1, masked keys."""
    data = checks.inputs(case, device)
    if family == "peaked":
        data["bias"] = data["bias"] * 4
    elif family == "sharp":
        data["q"], data["k"] = data["q"] * 3, data["k"] * 3
    elif family == "offset":
        data["v"] = data["v"] + 1
    return data


def emulated(data: checks.Data, precision: str) -> checks.Results:
    """The documented rounding of the kernels, in PyTorch on the same device."""
    q, k, v, bias, mask, dout = (data[name] for name in ("q", "k", "v", "bias", "mask", "dout"))
    scale = 1 / math.sqrt(q.shape[-1])
    keys = None if mask is None else mask[:, :, 0, 0]
    out, residual, lse = emulation.forward(q, k, v, bias[:, 0], keys, scale, precision)
    dq, dk, dv, dbias = emulation.backward(dout, q, k, v, bias[:, 0], keys, out, residual, lse, scale, precision)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias[:, None]}


@pytest.mark.parametrize("precision", list(turbopair.PRECISIONS))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dim", [16, 32])
def test_kernel_rounds_as_documented(hopper: torch.device, dim: int, family: str, precision: str, record_property: checks.Record) -> None:
    """The kernel's errors against FP64 are those of the emulation, tensor by tensor."""
    case = Case(n=200, slices=6, heads=2, dim=dim, bias_dtype=FP32, mask="bool" if family == "masked" else "none")
    data = family_inputs(family, case, hopper)
    result, model, gold = checks.operator(data, precision=precision), emulated(data, precision), numerics.gold(data)
    for name in numerics.TENSORS:
        error, expected = numerics.rmse(result[name], gold[name]), numerics.rmse(model[name], gold[name])
        # With split P the fp32 dbias keeps only rounding of the fp32 sums, whose size is a matter of order.
        ordered = result[name].dtype == FP32 and precision in ("split_p", "exact")
        bound = 3 * expected + 1e-3 * checks.floor(gold[name]) if ordered else 1.05 * expected
        record_property(f"max.rmse_over_emulation.{precision}.{name}", error / expected)
        assert error <= bound, f"{name}: RMSE {error:.3e}, emulation {expected:.3e}"


@pytest.mark.parametrize("n,slices", [(384, 384), (640, 24), (768, 24), (333, 40)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dim", [16, 32])
def test_exact_reaches_the_bf16_floor(
    hopper: torch.device, dim: int, family: str, n: int, slices: int, record_property: checks.Record
) -> None:
    """dq and dk as good as the rounded FP64 gradient; dbias in fp32 within 1 % of the bf16 floor."""
    case = Case(n=n, slices=slices, heads=4 if slices == 24 else 2, dim=dim, bias_dtype=FP32, mask="bool" if family == "masked" else "none")
    data = family_inputs(family, case, hopper)
    result, gold = checks.operator(data, precision="exact"), numerics.gold(data)
    ratios = {name: numerics.rmse(result[name], gold[name]) / checks.floor(gold[name]) for name in numerics.TENSORS}
    for name, ratio in ratios.items():
        record_property(f"max.exact_ratio_to_bf16_floor.{name}", ratio)
    limits = {"out": 1.01, "dq": 1.01, "dk": 1.01, "dbias": 0.01}
    wrong = {name: ratios[name] for name, limit in limits.items() if ratios[name] > limit}
    assert not wrong, f"{case} {family}: ratio to the bf16 floor {wrong}"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_precision_improves_on_the_one_before(hopper: torch.device, family: str) -> None:
    """The error of dbias falls in the order plain, paper, split_p; that of dq at last with exact. No option is inert."""
    case = Case(n=256, slices=8, bias_dtype=FP32, mask="bool" if family == "masked" else "none")
    data = family_inputs(family, case, hopper)
    gold = numerics.gold(data)
    errors = {}
    for precision in turbopair.PRECISIONS:
        result = checks.operator(data, precision=precision)
        errors[precision] = {name: numerics.rmse(result[name], gold[name]) for name in numerics.TENSORS}
    assert errors["paper"]["dbias"] < 0.9 * errors["plain"]["dbias"]
    assert errors["split_p"]["dbias"] < 0.2 * errors["paper"]["dbias"]
    assert errors["exact"]["dq"] < 0.9 * errors["split_p"]["dq"]


@pytest.mark.parametrize("factor", [8.0, 16.0])
@pytest.mark.parametrize("dim,dtype", [(16, BF16), (32, BF16), (64, BF16), (32, FP32)])
def test_cotangent_orthogonal_to_the_output(hopper: torch.device, dim: int, dtype: torch.dtype, factor: float) -> None:
    """Large q and k, and dO without a component along O: the true gradient is tiny, and must not blow up."""
    data = checks.inputs(Case(n=200, slices=4, dim=dim, dtype=dtype), hopper)
    data["q"], data["k"] = data["q"] * factor, data["k"] * factor
    out = numerics.gold(data)["out"]
    dout = data["dout"].double()
    along = (dout * out).sum(-1, keepdim=True) / out.square().sum(-1, keepdim=True)
    data["dout"] = (dout - along * out).to(dtype)
    result, gold, plain = checks.operator(data), numerics.gold(data), numerics.run(numerics.eager, data)
    for name in numerics.TENSORS:
        error, baseline = numerics.rmse(result[name], gold[name]), numerics.rmse(plain[name], gold[name])
        rounding = numerics.rmse(gold[name].to(dtype), gold[name])
        bound = numerics.FACTOR[dtype] * baseline + rounding
        assert error <= bound, f"{name}: RMSE {error:.3e}, unfused PyTorch {baseline:.3e}"
        assert result[name].double().norm() <= 1.5 * gold[name].norm() + bound * gold[name].numel() ** 0.5, f"{name}: the norm blows up"


@pytest.mark.parametrize("dim,dtype", [(16, BF16), (32, BF16), (64, BF16), (32, FP32)])
def test_values_of_magnitude_1e4(hopper: torch.device, dim: int, dtype: torch.dtype) -> None:
    """v and dO of 1e4 scale through; beyond fp16's range nothing saturates."""

    def enlarge(data: checks.Data) -> checks.Data:
        return {**data, "v": data["v"] * 1e4, "dout": data["dout"] * 1e4}

    checks.assert_accurate(Case(n=150, slices=4, dim=dim, dtype=dtype), hopper, enlarge)


@pytest.mark.parametrize("dim,dtype", [(16, BF16), (32, BF16), (64, BF16), (32, FP32)])
def test_queries_and_keys_of_magnitude_1e4(hopper: torch.device, dim: int, dtype: torch.dtype) -> None:
    """Scores near 1e9, of which fp32 keeps 64 as the last unit: all finite, and each output the v of the winning key."""
    data = checks.inputs(Case(n=150, slices=4, dim=dim, dtype=dtype), hopper)
    data["q"], data["k"] = data["q"] * 1e4, data["k"] * 1e4
    result, gold = checks.operator(data), numerics.gold(data)["out"]
    for name in numerics.TENSORS:
        assert result[name].isfinite().all(), f"{name} is not finite"
    assert result["dq"].abs().max() < 1e4 * 1e4, "dq blows up where the softmax is one key"
    right = ((result["out"].double() - gold).abs().amax(-1) < 0.02).double().mean().item()
    assert right > 0.999, f"{right:.4%} of the rows are right"


@pytest.mark.parametrize("bias_dtype", [BF16, FP32])
@pytest.mark.parametrize("dim,dtype", [(16, BF16), (32, BF16), (48, BF16), (32, FP32)])
def test_large_bias_and_forbidden_pairs(hopper: torch.device, dim: int, dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    """A bias of hundreds, and some entries -inf: such pairs have weight zero and nothing becomes NaN."""
    data = checks.inputs(Case(n=150, slices=4, dim=dim, dtype=dtype, bias_dtype=bias_dtype), hopper)
    data["bias"] = data["bias"] * 100
    forbidden = torch.rand(data["bias"].shape, device=hopper) < 0.1
    forbidden[..., 140] = False
    data["bias"] = data["bias"].masked_fill(forbidden, -torch.inf)
    result, gold = checks.operator(data), numerics.gold(data)
    assert not result["dbias"][forbidden].any()
    for name in numerics.TENSORS:
        assert result[name].isfinite().all(), f"{name} is not finite"
        error, size = numerics.rmse(result[name], gold[name]), gold[name].square().mean().sqrt().item()
        assert error <= 0.02 * size, f"{name}: RMSE {error:.3e} of {size:.3e}"


@pytest.mark.parametrize("dim,dtype", [(16, BF16), (32, BF16), (32, FP32)])
@pytest.mark.parametrize("n,mask", [(100, "none"), (500, "dead")])
def test_scale_zero_tiny_and_negative(hopper: torch.device, n: int, mask: str, dim: int, dtype: torch.dtype) -> None:
    """The backward divides the log-sum-exp by the scale, but for a scale of zero; 500 queries are several ranges."""
    data = checks.inputs(Case(n=n, slices=4, dim=dim, dtype=dtype, mask=mask), hopper)
    for scale in (0.0, 1e-12, -0.3):
        result, gold = checks.operator(data, scale=scale), numerics.gold(data, scale)
        for name in numerics.TENSORS:
            error, size = numerics.rmse(result[name], gold[name]), gold[name].square().mean().sqrt().item()
            assert error <= 0.02 * size, f"{name} at scale {scale}: RMSE {error:.3e} of {size:.3e}"
    zero = checks.operator(data, scale=0.0)
    assert not zero["dq"].any() and not zero["dk"].any()


@pytest.mark.parametrize("precision", ["paper", "exact"])
@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize("tensor", ["q", "dout"])
@pytest.mark.parametrize("row", [0, 8, 63, 64, 139])
def test_a_row_that_is_not_a_number_stays_one_row(hopper: torch.device, row: int, tensor: str, dim: int, precision: str) -> None:
    """NaN in one query is NaN in what depends on it, and changes no bit of anything else: no neighbour in a tile, no other slice."""
    data = checks.inputs(Case(n=140, slices=4, dim=dim, bias_dtype=FP32), hopper)
    right = checks.operator(data, precision=precision)
    broken = {**data, tensor: data[tensor].clone()}
    broken[tensor][0, 1, row, 0] = torch.nan
    result = checks.operator(broken, precision=precision)
    assert result["dq"][0, 1, row, 0].isnan().all() and result["dk"][0, 1, :, 0].isnan().all()
    assert result["dbias"][0, 0, 0, row].isnan().all()
    same = torch.ones(right["dq"].shape[:-1], dtype=torch.bool, device=hopper)
    same[0, 1, row, 0] = False
    for name in ("out", "dq"):
        assert torch.equal(result[name][same], right[name][same]), f"{name} of another row or slice"
    same[0, 1, :, 0] = False
    for name in ("dk", "dv"):
        assert torch.equal(result[name][same], right[name][same]), f"{name} of another slice or head"
    other = torch.arange(140, device=hopper) != row
    assert torch.equal(result["dbias"][0, 0, 0, other], right["dbias"][0, 0, 0, other])
    assert torch.equal(result["dbias"][0, 0, 1], right["dbias"][0, 0, 1])


def pairformer_attention(x: Tensor, weights: dict[str, Tensor], mask: Tensor, attention: numerics.Attention) -> Tensor:
    """Triangle attention of a Pairformer block around the starting node: norm, projections, gate; ``x`` [I, N, C]."""
    heads, dim = 4, 32
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:])
    q, k, v, gate = ((normed @ weights[name]).unflatten(-1, (heads, dim)) for name in ("q", "k", "v", "gate"))
    bias = (normed @ weights["bias"]).permute(2, 0, 1)[None]
    out = attention(q, k, v, bias, mask)
    return (torch.sigmoid(gate) * out).flatten(-2) @ weights["out"]


def test_a_masked_pairformer_block(hopper: torch.device) -> None:
    """Starting then ending node with residuals and a padded tail, forward and weight gradients: kernel, plain bf16 and FP64."""
    generator = torch.Generator().manual_seed(0)
    n, channels = 160, 128
    widths = {"q": 128, "k": 128, "v": 128, "gate": 128, "bias": 4, "out": channels}
    weights = {
        name: (torch.randn(channels, width, generator=generator) / math.sqrt(channels)).bfloat16().to(hopper)
        for name, width in widths.items()
    }
    x, cotangent = (torch.randn(n, n, channels, generator=generator).bfloat16().to(hopper) for _ in range(2))
    keep = (torch.arange(n, device=hopper) < 130)[None, None, None, :].expand(n, 1, 1, n)

    def block(dtype: torch.dtype, attention: numerics.Attention) -> dict[str, Tensor]:
        leaves = {name: value.to(dtype).requires_grad_() for name, value in weights.items()}
        pair = x.to(dtype)
        pair = pair + pairformer_attention(pair, leaves, keep, attention)
        pair = pair + pairformer_attention(pair.transpose(0, 1), leaves, keep, attention).transpose(0, 1)
        gradients = torch.autograd.grad(pair, list(leaves.values()), cotangent.to(dtype))
        return {"pair": pair.detach(), **dict(zip(leaves, gradients, strict=True))}

    gold, plain, ours = block(torch.float64, numerics.eager), block(BF16, numerics.eager), block(BF16, turbopair.triangle_attention)
    for name, want in gold.items():
        error, baseline = numerics.rmse(ours[name], want), numerics.rmse(plain[name], want)
        assert error <= 1.1 * baseline, f"{name}: RMSE {error:.3e}, plain bf16 {baseline:.3e}"
        cosine = torch.nn.functional.cosine_similarity(ours[name].double().flatten(), want.flatten(), dim=0).item()
        assert cosine > 0.999, f"{name}: cosine {cosine:.6f} to FP64"
