"""The analytic reference against autograd on the textbook formula, and its chunking."""

import pytest
import torch

from tests.support.numerics import Case, eager, gold, inputs, run
from turbopair.triangle_attention import reference as module
from turbopair.triangle_attention.reference import reference

F64 = torch.float64


@pytest.mark.parametrize("mask", ["none", "bool", "additive", "dead"])
@pytest.mark.parametrize("batch", [(1,), (2,)])
def test_gradients_equal_autograd(mask: str, batch: tuple[int, ...]) -> None:
    data = inputs(Case(n=9, keys=13, slices=4, dim=8, batch=batch, dtype=F64, mask=mask))
    want, got = run(eager, data), gold(data)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-13)


def test_lse_and_dtypes() -> None:
    data = inputs(Case(n=9, slices=4, mask="dead"))
    arguments = (data["q"], data["k"], data["v"], data["bias"][:, 0], data["mask"][:, :, 0, 0])
    result = reference(*arguments)
    assert set(result) == {"out", "lse"} and all(tensor.dtype == F64 for tensor in result.values())
    scores = torch.einsum("biqhd,bikhd->bihqk", data["q"].double(), data["k"].double()) * 32**-0.5 + data["bias"].double()
    lse = scores.masked_fill(~data["mask"], -torch.inf).logsumexp(-1)
    torch.testing.assert_close(result["lse"][:, [0, 2, 3]], lse[:, [0, 2, 3]], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result["lse"][:, 1], torch.full_like(lse[:, 1], 9.0).log())
    single = reference(*arguments, dout=data["dout"], dtype=torch.float32)
    assert set(single) == {"out", "lse", "dq", "dk", "dv", "dbias"} and all(tensor.dtype == torch.float32 for tensor in single.values())


def test_chunks_cover_every_slice_once_and_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(2, 10, 8, 4, 2)
    assert list(module.chunks(q, q, 8, limit=3 * 4 * 8 * 8 * 8)) == [
        (b, slice(start, min(start + 3, 10))) for b in range(2) for start in (0, 3, 6, 9)
    ]
    assert len(list(module.chunks(q, q, 8, limit=1))) == 20
    # N = 768, H = 4 in FP64: a handful of slices at a time, not 768.
    big = torch.empty(1, 768, 768, 4, 32, device="meta")
    largest = max(part.stop - part.start for _, part in module.chunks(big, big, 8))
    assert largest * 4 * 768 * 768 * 8 <= module.CHUNK_BYTES

    data = inputs(Case(n=20, slices=7, dtype=F64, mask="dead"))
    whole = gold(data)
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    for name, tensor in gold(data).items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-12, atol=1e-14)


def test_runs_without_recording_a_graph() -> None:
    data = inputs(Case(n=9, dtype=F64))
    result = reference(data["q"].requires_grad_(), data["k"], data["v"], data["bias"][:, 0], dout=data["dout"])
    assert not any(tensor.requires_grad for tensor in result.values())
