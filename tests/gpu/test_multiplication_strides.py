"""Triangle multiplication on every memory layout a model passes: the same bits as on contiguous tensors."""

import pytest
import torch
from torch import Tensor

from tests.gpu.multiplication import assert_same_bits, operator
from tests.support import multiplication
from tests.support.multiplication import Case
from turbopair import TriangleMultiplicationWeights

pytestmark = pytest.mark.gpu


def _relayout(tensor: Tensor, layout: str) -> Tensor:
    """The same values of ``[*B, N, N, C]`` elsewhere in memory."""
    if layout == "transposed":  # as OpenFold3's ending node passes the pair tensor
        return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "part":  # channels out of a wider tensor, aligned
        wide = tensor.new_full((*tensor.shape[:-1], 3 * tensor.shape[-1]), torch.nan)
        wide[..., tensor.shape[-1] : 2 * tensor.shape[-1]] = tensor
        return wide[..., tensor.shape[-1] : 2 * tensor.shape[-1]]
    if layout == "unaligned":
        flat = tensor.new_full((tensor.numel() + 1,), torch.nan)
        flat[1:] = tensor.flatten()
        return flat[1:].view(tensor.shape)
    if layout == "odd_rows":  # strides that are no multiple of 16 bytes
        wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan)
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]
    if layout == "channels_outermost":
        return tensor.movedim(-1, -3).contiguous().movedim(-3, -1)
    raise ValueError(layout)


@pytest.mark.parametrize("layout", ["transposed", "part", "unaligned", "odd_rows", "channels_outermost"])
@pytest.mark.parametrize("tensor", ["z", "dout"])
@pytest.mark.parametrize("channels", [64, 128])
def test_layouts(hopper: torch.device, channels: int, tensor: str, layout: str) -> None:
    for n, direction in ((61, "outgoing"), (64, "incoming")):
        data = multiplication.inputs(Case(n=n, channels=channels, batch=(2,), mask="bool", weights="fp32", direction=direction), hopper)
        expected = operator(data)
        assert_same_bits(operator({**data, tensor: _relayout(data[tensor], layout)}), expected, f"{tensor} {layout}, N = {n}")


def test_expanded_cotangent(hopper: torch.device) -> None:
    """What ``out.sum().backward()`` passes: one element with strides of zero."""
    data = multiplication.inputs(Case(n=40, channels=64, weights="fp32"), hopper)
    one = torch.ones((), dtype=torch.bfloat16, device=hopper)
    expanded = operator({**data, "dout": one.expand_as(data["z"])})
    assert_same_bits(expanded, operator({**data, "dout": torch.ones_like(data["z"])}), "expanded cotangent")


@pytest.mark.parametrize("kind", ["transposed", "expanded", "sliced"])
def test_mask_layouts(hopper: torch.device, kind: str) -> None:
    data = multiplication.inputs(Case(n=50, channels=64, batch=(2,), mask="bool", weights="fp32"), hopper)
    mask = data["mask"]
    if kind == "expanded":
        mask = mask[:, :, :1].expand_as(mask)
    other = {
        "transposed": lambda: mask.mT.contiguous().mT,
        "expanded": lambda: mask,
        "sliced": lambda: mask.repeat_interleave(2, -1)[..., ::2],
    }[kind]()
    expected = operator({**data, "mask": mask.contiguous()})
    assert_same_bits(operator({**data, "mask": other}), expected, f"{kind} mask")


@pytest.mark.parametrize("kind", ["transposed", "flat"])
def test_weight_layouts(hopper: torch.device, kind: str) -> None:
    """Transposed matrices, and parameters as slices of one flat buffer at any alignment."""
    data = multiplication.inputs(Case(n=40, channels=64, weights="bf16"), hopper)

    def elsewhere(weight: Tensor) -> Tensor:
        if kind == "transposed":
            return weight.mT.contiguous().mT if weight.dim() == 2 else weight
        flat = torch.zeros(weight.numel() + 1, dtype=weight.dtype, device=weight.device)
        flat[1:] = weight.flatten()
        return flat[1:].view(weight.shape)

    moved = TriangleMultiplicationWeights(*map(elsewhere, data["weights"]))
    assert_same_bits(operator({**data, "weights": moved}), operator(data), f"{kind} weights")
