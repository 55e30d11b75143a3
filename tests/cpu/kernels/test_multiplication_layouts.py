"""Batch prefixes, strides, shared masks, sizes of zero: the same numbers whatever the layout of a triangle multiplication's inputs."""

import pytest
import torch
from torch import Tensor

import turbopair
from tests.support.multiplication import TENSORS, Case, Data, inputs, run

BF16, F32 = torch.bfloat16, torch.float32
multiplication = turbopair.triangle_multiplication
PAIRS = ("z", "mask", "dout")


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], names: tuple[str, ...] = TENSORS) -> None:
    for name in names:
        assert torch.equal(first[name], second[name]), name


def assert_near(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Weight gradients that are the same sum in another order."""
    for name in TENSORS:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-4)


def each(data: Data, *names: str, by: object) -> Data:
    return {**data, **{name: by(data[name]) for name in names}}  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_template_prefix_equals_the_loop(dtype: torch.dtype) -> None:
    data = inputs(Case(batch=(2, 3), dtype=dtype))
    whole = run(multiplication, data)
    for b in range(2):
        for t in range(3):
            part = run(multiplication, each(data, *PAIRS, by=lambda tensor, at=(b, t): tensor[at]))
            assert_same({name: whole[name][b, t] for name in ("out", "dz")}, part, ("out", "dz"))


def test_weight_gradients_sum_over_the_batch() -> None:
    data = inputs(Case(batch=(3,), dtype=torch.float64))
    whole = run(multiplication, data)
    parts = [run(multiplication, each(data, *PAIRS, by=lambda tensor, b=b: tensor[b])) for b in range(3)]
    for name in TENSORS[2:]:
        torch.testing.assert_close(whole[name], sum(part[name] for part in parts), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_views_without_contiguous_memory(dtype: torch.dtype) -> None:
    data = inputs(Case(batch=(2,), dtype=dtype))
    want = run(multiplication, data)
    transposed = each(data, *PAIRS, by=lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2))
    assert not transposed["z"].is_contiguous()
    assert_same(want, run(multiplication, transposed))
    channels_strided = each(data, "z", "dout", by=lambda tensor: torch.stack([tensor] * 2, -1)[..., 0])
    assert channels_strided["z"].stride(-1) == 2
    assert_same(want, run(multiplication, channels_strided))
    part_of_more = each(data, *PAIRS, by=lambda tensor: torch.cat([tensor, tensor], 2)[:, :, :9])
    assert_same(want, run(multiplication, part_of_more))
    swapped = each(data, *PAIRS, by=lambda tensor: torch.stack([tensor] * 2).transpose(0, 1))
    assert_same(
        {name: want[name] for name in ("out", "dz")},
        {k: v[:, 1] for k, v in run(multiplication, swapped).items() if k in ("out", "dz")},
        ("out", "dz"),
    )


def test_transposed_weights() -> None:
    data = inputs(Case(dtype=F32))
    want = run(multiplication, data)
    weights = turbopair.TriangleMultiplicationWeights(
        *(w.T.contiguous().T if w.dim() == 2 else torch.stack([w] * 2, -1)[:, 0] for w in data["weights"])
    )
    assert_near(want, run(multiplication, {**data, "weights": weights}))


def test_expanded_z_and_the_gradient_of_what_was_expanded() -> None:
    """A pair tensor made from one row: stride 0 over i."""
    data = inputs(Case(dtype=F32))
    row = data["z"][:, :1].clone().requires_grad_()
    z = row.expand(-1, 9, -1, -1)
    out = multiplication(z, data["mask"], data["weights"], "outgoing")
    (got,) = torch.autograd.grad(out, row, data["dout"])
    want = run(multiplication, {**data, "z": z.detach().contiguous()})
    assert torch.equal(out, want["out"])
    torch.testing.assert_close(got, want["dz"].sum(1, keepdim=True))


def test_mask_shared_by_a_batch_dimension() -> None:
    data = inputs(Case(batch=(2, 3)))
    shared = data["mask"][:, :1]
    assert_same(
        run(multiplication, {**data, "mask": shared}), run(multiplication, {**data, "mask": shared.expand(2, 3, 9, 9).contiguous()})
    )
    one = inputs(Case(batch=(2,)))
    mask = one["mask"][:1]
    assert_same(run(multiplication, {**one, "mask": mask}), run(multiplication, {**one, "mask": mask.repeat(2, 1, 1)}))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_bool_and_float_mask_agree_and_ones_change_nothing(dtype: torch.dtype) -> None:
    data = inputs(Case(dtype=dtype))
    want = run(multiplication, data)
    for kind in (BF16, F32):
        assert_same(want, run(multiplication, {**data, "mask": data["mask"].to(kind)}))
    ones = torch.ones_like(data["mask"])
    assert_same(run(multiplication, {**data, "mask": None}), run(multiplication, {**data, "mask": ones}))


def test_outputs_and_gradients_have_plain_layouts() -> None:
    data = inputs(Case(batch=(2, 2), weights="mixed"))
    data["z"] = data["z"].transpose(2, 3)
    z = data["z"].detach().requires_grad_()
    out = multiplication(z, data["mask"], data["weights"], "incoming")
    assert out.is_contiguous() and out.dtype == BF16 and out.shape == z.shape
    got = run(multiplication, data)
    assert all(
        got[f"d{name}"].dtype == weight.dtype and got[f"d{name}"].is_contiguous()
        for name, weight in zip(data["weights"]._fields, data["weights"], strict=True)
    )


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("batch", [(0,), (2, 0)])
def test_an_empty_batch(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    got = run(
        multiplication,
        inputs(Case(batch=(), dtype=dtype))
        | {"z": torch.empty(*batch, 9, 9, 32, dtype=dtype), "dout": torch.empty(*batch, 9, 9, 32, dtype=dtype), "mask": None},
    )
    assert got["out"].shape == got["dz"].shape == (*batch, 9, 9, 32)
    assert not any(got[name].any() for name in TENSORS[2:])


def test_outgoing_and_incoming_mirror_each_other() -> None:
    """Incoming on z is outgoing on z with i and j exchanged, but for the output's own place."""
    data = inputs(Case(dtype=torch.float64, mask="float"))
    incoming = multiplication(data["z"], data["mask"], data["weights"], "incoming")
    outgoing = multiplication(data["z"].transpose(1, 2), data["mask"].mT, data["weights"], "outgoing")
    gate = (
        torch.nn.functional.layer_norm(data["z"], (32,), data["weights"].norm_in_weight, data["weights"].norm_in_bias)
        @ data["weights"].gate.T
    )
    ungated, other = incoming / gate.sigmoid(), outgoing / gate.transpose(1, 2).sigmoid()
    torch.testing.assert_close(ungated, other, rtol=1e-9, atol=1e-9)
