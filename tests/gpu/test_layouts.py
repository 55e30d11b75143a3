"""Strides, prefixes and broadcasts: the same numbers in another place give the same results."""

import pytest
import torch

import turbopair
from pipeline.measure import peak_bytes
from tests.gpu import checks
from tests.support.numerics import Case

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
LAYOUTS = ("ending", "heads_first", "packed", "offset", "last")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype,dim", [(BF16, 16), (BF16, 32), (BF16, 24), (BF16, 64), (FP32, 32)])
def test_layouts_of_q_k_v(hopper: torch.device, layout: str, dtype: torch.dtype, dim: int) -> None:
    data = checks.inputs(Case(n=77, slices=70, dim=dim, dtype=dtype, mask="bool"), hopper)
    expected = checks.operator(data)
    for names in (("q",), ("k",), ("v",), ("dout",), ("q", "k", "v", "dout")):
        changed = {name: checks.relayout(value, layout) if name in names else value for name, value in data.items()}
        for name in names:
            assert torch.equal(changed[name], data[name])
        checks.assert_same_bits(checks.operator(changed), expected, f"{layout} {names}")


@pytest.mark.parametrize("dim", [16, 32, 64])
def test_stride_zero_cotangent_and_inputs(hopper: torch.device, dim: int) -> None:
    """``out.sum().backward()`` hands over a cotangent of strides 0; a query shared by all slices is an expanded one."""
    data = checks.inputs(Case(n=65, slices=4, dim=dim), hopper)
    data["dout"] = torch.ones((), dtype=BF16, device=hopper).expand(data["q"].shape)
    data["q"] = data["q"][:, :1].expand_as(data["q"])
    solid = {name: None if value is None else value.contiguous() for name, value in data.items()}
    checks.assert_same_bits(checks.operator(data), checks.operator(solid), "expanded q and dout")


@pytest.mark.parametrize("bias_dtype", [BF16, FP32])
@pytest.mark.parametrize("dtype,dim", [(BF16, 32), (BF16, 16), (BF16, 64), (FP32, 32)])
@pytest.mark.parametrize("layout", ["heads_fastest", "transposed", "expanded_rows", "sliced"])
def test_layouts_of_the_bias(hopper: torch.device, layout: str, dtype: torch.dtype, dim: int, bias_dtype: torch.dtype) -> None:
    data = checks.inputs(Case(n=77, keys=90, slices=5, heads=4, dim=dim, dtype=dtype, bias_dtype=bias_dtype, batch=(2,)), hopper)
    expected = checks.operator(data)
    assert expected["dbias"].dtype == bias_dtype
    bias = data["bias"]
    if layout == "heads_fastest":
        data["bias"] = bias.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    elif layout == "transposed":
        data["bias"] = bias.transpose(-2, -1).contiguous().transpose(-2, -1)
    elif layout == "sliced":
        wide = bias.new_full((2, 1, 4, 80, 101), torch.nan)
        wide[..., 3:, 5:95] = bias
        data["bias"] = wide[..., 3:, 5:95]
    if layout == "expanded_rows":
        leaf = bias.clone().requires_grad_()
        out = turbopair.triangle_attention(data["q"], data["k"], data["v"], leaf.expand(-1, 5, -1, -1, -1))
        (gradient,) = torch.autograd.grad(out, leaf, data["dout"])
        assert checks.same_bits(out, expected["out"]) and checks.same_bits(gradient, expected["dbias"])
        return
    assert torch.equal(data["bias"], bias)
    checks.assert_same_bits(checks.operator(data), expected, layout)


@pytest.mark.parametrize("dtype,dim", [(BF16, 32), (BF16, 48), (FP32, 16)])
@pytest.mark.parametrize("batch", [(), (2,), (3,), (2, 2)])
def test_batches_with_distinct_biases(hopper: torch.device, batch: tuple[int, ...], dtype: torch.dtype, dim: int) -> None:
    """A prefix equals the loop over it, bit for bit: also the 6-D ``(batch, templates, ...)`` of the template embedder."""
    case = Case(n=70, slices=4, heads=2, dim=dim, dtype=dtype, batch=batch, mask="bool")
    result = checks.assert_accurate(case, hopper)
    data = checks.inputs(case, hopper)
    for index in [()] if not batch else list(torch.cartesian_prod(*map(torch.arange, batch)).reshape(-1, len(batch)).tolist()):
        part = {name: value[tuple(index)] for name, value in data.items()}
        own, expected = checks.operator(part), {name: value[tuple(index)] for name, value in result.items()}
        checks.assert_same_bits(own, expected, f"element {index}", ("out", "dq", "dk", "dv"))
        # The order of the sum over slices may depend on the size of the batch.
        torch.testing.assert_close(own["dbias"], expected["dbias"], rtol=2.0**-7, atol=2.0**-12)


def test_bias_shared_by_the_batch_sums_its_gradient(hopper: torch.device) -> None:
    case = Case(n=70, slices=4, batch=(3,), bias_dtype=FP32)
    data = checks.inputs(case, hopper)
    leaf = data["bias"][:1].clone().requires_grad_()
    out = turbopair.triangle_attention(data["q"], data["k"], data["v"], leaf)
    (gradient,) = torch.autograd.grad(out, leaf, data["dout"])
    separate = checks.operator({**data, "bias": data["bias"][:1].expand_as(data["bias"]).contiguous()})
    assert checks.same_bits(out, separate["out"])
    torch.testing.assert_close(gradient, separate["dbias"].sum(0, keepdim=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [32, 64])
def test_chunks_of_rows(hopper: torch.device, dim: int) -> None:
    """A chunk of slices gives the same rows, and the bias gradients of the chunks add up to that of the whole."""
    data = checks.inputs(Case(n=90, slices=9, dim=dim, bias_dtype=FP32, mask="bool"), hopper)
    whole = checks.operator(data)
    total = torch.zeros_like(whole["dbias"])
    for rows in (slice(0, 4), slice(4, 5), slice(5, 9)):
        part = checks.operator({name: value if name == "bias" else value[:, rows] for name, value in data.items()})
        names = ("out", "dq", "dk", "dv")
        checks.assert_same_bits(part, {name: whole[name][:, rows] for name in names}, f"rows {rows}", names)
        total += part["dbias"]
    torch.testing.assert_close(total, whole["dbias"], rtol=1e-5, atol=1e-5)


def test_expanded_bias_costs_no_copy(hopper: torch.device) -> None:
    """Four chunks with an expanded bias: the peak above the inputs stays far below one copy a row."""
    n, rows = 512, 256
    q, k, v = (torch.randn(1, rows, n, 4, 32, dtype=BF16, device=hopper) for _ in range(3))
    leaf = torch.randn(1, 1, 4, n, n, dtype=BF16, device=hopper).requires_grad_()

    def chunks() -> None:
        for part in torch.arange(rows, device="cpu").chunk(4):
            rows_ = slice(int(part[0]), int(part[-1]) + 1)
            bias = leaf.expand(-1, len(part), -1, -1, -1)
            turbopair.triangle_attention(q[:, rows_].detach().requires_grad_(), k[:, rows_], v[:, rows_], bias).sum().backward()

    peak = peak_bytes(chunks, hopper)
    copy = leaf.numel() * 2 * (rows // 4)
    assert peak < 1.5 * copy, f"peak {peak >> 20} MiB; one expanded copy is {copy >> 20} MiB"


@pytest.mark.parametrize("dtype,dim", [(BF16, 32), (BF16, 48), (FP32, 32)])
@pytest.mark.may_skip
def test_strides_beyond_32_bits(hopper: torch.device, dtype: torch.dtype, dim: int) -> None:
    """Two slices more than 2^31 elements apart."""
    far = 2**31 + 4096
    small = checks.inputs(Case(n=130, slices=2, dim=dim, dtype=dtype), hopper)
    _require_memory(far * dtype.itemsize + (2 << 30))
    store = torch.empty(far + (1 << 20), dtype=dtype, device=hopper)
    expected, size = checks.operator(small), small["q"][0, 0].numel()
    moved = dict(small)
    for place, name in enumerate(("q", "k", "v", "dout")):
        view = store.as_strided(small[name].shape, (0, far, *small[name].stride()[2:]), place * (size + 64))
        view.copy_(small[name])
        moved[name] = view
    checks.assert_same_bits(checks.operator(moved), expected, "slices 2^31 elements apart")


@pytest.mark.parametrize("dim", [32, 48])
@pytest.mark.may_skip
def test_more_than_2_to_31_elements(hopper: torch.device, dim: int) -> None:
    """Contiguous tensors of more than 2^31 elements: the last slices equal a call on them alone."""
    n, heads, last = 64, 4, 8
    slices = 2**31 // (n * heads * dim) + last
    _require_memory(14 * slices * n * heads * dim * 2)
    q, k, v, dout = (torch.empty(1, slices, n, heads, dim, dtype=BF16, device=hopper).normal_() for _ in range(4))
    bias = torch.randn(1, 1, heads, n, n, dtype=BF16, device=hopper)
    whole = checks.operator({"q": q, "k": k, "v": v, "bias": bias, "mask": None, "dout": dout})
    tail = {"q": q[:, -last:], "k": k[:, -last:], "v": v[:, -last:], "bias": bias, "mask": None, "dout": dout[:, -last:]}
    names = ("out", "dq", "dk", "dv")
    expected = checks.operator(tail)
    checks.assert_same_bits({name: whole[name][:, -last:] for name in names}, expected, f"last of {slices} slices", names)
    assert whole["dbias"].isfinite().all() and whole["dbias"].any()


def _require_memory(needed: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory, {free >> 30} GiB are free")
