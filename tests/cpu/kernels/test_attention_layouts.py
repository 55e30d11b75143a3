"""Batch prefixes, strides, shared and expanded biases, sizes of zero: the same numbers whatever the layout."""

import pytest
import torch
from torch import Tensor

import turbopair
from tests.support.numerics import TENSORS, Case, inputs, run

BF16, F32 = torch.bfloat16, torch.float32
attention = turbopair.triangle_attention


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name in TENSORS:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_template_prefix_equals_the_loop(dtype: torch.dtype) -> None:
    data = inputs(Case(n=20, slices=4, batch=(2, 3), mask="dead", dtype=dtype))
    whole = run(attention, data)
    for b in range(2):
        for t in range(3):
            part = run(attention, {name: tensor[b, t] for name, tensor in data.items()})
            assert_same({name: whole[name][b, t] for name in TENSORS}, part)


def test_batch_prefix_that_cannot_be_viewed_is_copied() -> None:
    data = inputs(Case(n=12, batch=(2, 3), dtype=F32, mask="bool"))
    swapped = {name: tensor.transpose(0, 1).contiguous().transpose(0, 1) for name, tensor in data.items()}
    assert_same(run(attention, data), run(attention, swapped))


@pytest.mark.parametrize("mask", ["bool", "additive"])
def test_batch_elements_have_their_own_bias(mask: str) -> None:
    data = inputs(Case(n=20, batch=(3,), dtype=F32, mask=mask))
    whole = run(attention, data)
    for b in range(3):
        part = run(attention, {name: tensor[b : b + 1] for name, tensor in data.items()})
        assert_same({name: whole[name][b : b + 1] for name in TENSORS}, part)


def test_transposed_views_as_the_ending_node_makes_them() -> None:
    """Ending-node attention swaps the two pair dimensions: rows become slices, by strides alone."""
    data = inputs(Case(n=20, slices=20, dtype=BF16))
    views = {name: data[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v", "dout")}
    assert all(not view.is_contiguous() for view in views.values())
    bias = data["bias"].permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    assert_same(run(attention, data), run(attention, {**data, **views, "bias": bias}))


def test_head_dimension_with_a_stride_and_slices_of_a_projection() -> None:
    data = inputs(Case(n=20, dtype=BF16, dim=16))
    strided = {name: torch.stack([data[name]] * 2, -1)[..., 0] for name in ("q", "k", "v", "dout")}
    joined = torch.cat([data[name] for name in ("q", "k", "v")], -1)
    parts = dict(zip(("q", "k", "v"), joined.split(16, -1), strict=True))
    want = run(attention, data)
    assert_same(want, run(attention, {**data, **strided}))
    assert_same(want, run(attention, {**data, **parts}))


def test_outputs_and_gradients_have_plain_layouts() -> None:
    data = inputs(Case(n=12, slices=12, batch=(2, 2), dtype=BF16, bias_dtype=F32))
    data["q"] = data["q"].transpose(2, 3)
    data["bias"] = data["bias"].transpose(-1, -2)
    got = run(attention, data)
    assert got["out"].is_contiguous()
    assert {name: tensor.dtype for name, tensor in got.items()} == {"out": BF16, "dq": BF16, "dk": BF16, "dv": BF16, "dbias": F32}


def expanded(data: dict[str, Tensor], make: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients when the bias is expanded over slices in one of several ways; dbias is that of the unexpanded tensor."""
    leaves = {name: data[name].clone().requires_grad_() for name in ("q", "k", "v", "bias")}
    bias, slices = leaves["bias"], data["q"].shape[-4]
    if make == "of a result":
        bias = bias * 1
    if make == "of a view":
        bias = (bias * 1).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    bias = bias.expand(-1, slices, -1, -1, -1)
    if make == "then viewed":
        bias = bias.transpose(-1, -2).transpose(-1, -2)
    assert bias.stride(1) == 0
    out = attention(leaves["q"], leaves["k"], leaves["v"], bias, data["mask"])
    gradients = torch.autograd.grad(out, list(leaves.values()), data["dout"])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=True))}


@pytest.mark.parametrize("make", ["of the leaf", "of a result", "of a view", "then viewed"])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_expanded_bias_is_the_same_bias(make: str, batch: int, dtype: torch.dtype) -> None:
    data = inputs(Case(n=20, slices=5, batch=(batch,), dtype=dtype, mask="bool"))
    assert_same(run(attention, data), expanded(data, make))


class TripledGradient(torch.autograd.Function):
    """A view in the forward whose gradient is not the identity: it must not be skipped."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 3 * grad


@pytest.mark.parametrize("after", [False, True])
def test_custom_functions_around_the_expansion_keep_their_gradient(after: bool) -> None:
    data = inputs(Case(n=12, dtype=F32))
    bias = data["bias"].clone().requires_grad_()
    shared = TripledGradient.apply(bias.expand(-1, 3, -1, -1, -1)) if after else TripledGradient.apply(bias).expand(-1, 3, -1, -1, -1)
    (gradient,) = torch.autograd.grad(attention(data["q"], data["k"], data["v"], shared), bias, data["dout"])
    torch.testing.assert_close(gradient, 3 * run(attention, data)["dbias"])


def test_gradient_of_an_intermediate_view_of_an_expanded_bias() -> None:
    data = inputs(Case(n=12, dtype=F32))
    view = (data["bias"].clone().requires_grad_() * 1).mT.mT
    out = attention(data["q"], data["k"], data["v"], view.expand(-1, 3, -1, -1, -1))
    assert torch.equal(torch.autograd.grad(out, view, data["dout"])[0], run(attention, data)["dbias"])


def test_expanded_bias_makes_no_tensor_of_the_expanded_size() -> None:
    """Of a plain expansion neither the forward nor the backward may make one; counted on the operations that run."""
    data = inputs(Case(n=32, slices=64, heads=1, dim=8, dtype=BF16))
    bias = data["bias"].clone().requires_grad_()
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return result

    with Largest():
        out = attention(data["q"], data["k"], data["v"], bias.expand(-1, 64, -1, -1, -1))
        out.backward(data["dout"])
    assert bias.grad is not None
    assert 0 < largest < 64 * data["bias"].nbytes


def test_bias_and_mask_shared_by_a_batch_dimension() -> None:
    data = inputs(Case(n=12, slices=3, batch=(2,), dtype=F32, mask="bool"))
    data["bias"], data["mask"] = data["bias"][:1], data["mask"][:1, :1]
    got = run(attention, data)
    full = run(attention, {**data, "bias": data["bias"].repeat(2, 1, 1, 1, 1), "mask": data["mask"].repeat(2, 3, 1, 1, 1)})
    assert torch.equal(got["out"], full["out"])
    torch.testing.assert_close(got["dbias"], full["dbias"].sum(0, keepdim=True))


@pytest.mark.parametrize("dtype", [BF16, F32, torch.float64], ids=str)
@pytest.mark.parametrize(("batch", "slices"), [(0, 3), (2, 0), (0, 0)])
def test_no_slices_give_an_empty_output_and_a_zero_bias_gradient(dtype: torch.dtype, batch: int, slices: int) -> None:
    data = inputs(Case(n=12, slices=slices, batch=(batch,), dtype=dtype))
    got = run(attention, data)
    assert got["out"].shape == data["q"].shape
    assert got["dbias"].shape == data["bias"].shape
    assert not got["dbias"].any()


def test_inputs_are_left_as_they_were() -> None:
    data = inputs(Case(n=20, mask="additive"))
    before = {name: tensor.clone() for name, tensor in data.items()}
    run(attention, data)
    assert all(torch.equal(before[name], tensor) for name, tensor in data.items())
