"""The analytic reference of triangle multiplication against autograd on the textbook formula, and its chunking."""

import pytest
import torch

from tests.support.multiplication import TENSORS, Case, gold, inputs
from turbopair.triangle_multiplication import reference as module
from turbopair.triangle_multiplication.reference import reference

F64 = torch.float64


def computed(data: dict, **options: object) -> dict[str, torch.Tensor]:
    return reference(data["z"], data["mask"], data["weights"], data["direction"], dout=data["dout"], **options)


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "padded"])
@pytest.mark.parametrize("n", [1, 9])
def test_gradients_equal_autograd(n: int, mask: str, direction: str) -> None:
    # From bf16 inputs: the reference widens them by itself.
    data = inputs(Case(n=n, batch=(2,), mask=mask, direction=direction))
    want, got = gold(data), computed(data)
    assert tuple(got) == TENSORS
    for name in want:
        torch.testing.assert_close(got[name], want[name].double(), rtol=1e-12, atol=1e-12)


def test_dtypes_and_forward_alone() -> None:
    data = inputs(Case(n=9))
    alone = reference(data["z"], data["mask"], data["weights"])
    assert set(alone) == {"out"} and alone["out"].dtype == F64
    single = computed(data, dtype=torch.float32)
    assert all(tensor.dtype == torch.float32 for tensor in single.values())
    torch.testing.assert_close(single["out"].double(), alone["out"], rtol=1e-5, atol=1e-5)


def test_chunks_cover_every_row_once_and_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.empty(2, 10, 10, 4)
    assert list(module.chunks(z, 8, limit=3 * 10 * 4 * 8)) == [(b, slice(i, min(i + 3, 10))) for b in range(2) for i in (0, 3, 6, 9)]
    assert len(list(module.chunks(z, 8, limit=1))) == 20
    # N = 1024, C = 128 in FP64: z alone would be 1 GiB.
    big = torch.empty(1, 1024, 1024, 128, device="meta")
    assert max(part.stop - part.start for _, part in module.chunks(big, 8)) * 1024 * 128 * 8 <= module.CHUNK_BYTES

    data = inputs(Case(n=11, batch=(2,), dtype=F64))
    whole = computed(data)
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    for name, tensor in computed(data).items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-12, atol=1e-13)


def test_runs_without_recording_a_graph() -> None:
    data = inputs(Case(n=9, dtype=F64))
    data["z"].requires_grad_()
    assert not any(tensor.requires_grad for tensor in computed(data).values())


def test_what_is_kept_between_the_passes() -> None:
    data = inputs(Case(n=9, dtype=F64, mask="none"))
    _, a, b, x = module.forward(data["z"], None, data["weights"], True, 1e-5, F64)
    assert a.shape == b.shape == x.shape == (1, 32, 9, 16)
    assert not a[..., 9:].any() and not b[..., 9:].any() and a[..., :9].all()
    torch.testing.assert_close(x[..., :9], torch.einsum("bcik,bcjk->bcij", a, b), rtol=1e-12, atol=1e-12)
