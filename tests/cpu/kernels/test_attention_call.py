"""What a call of the CUDA back end hands to the library: arguments, copies and allocations, with CPU tensors and nothing behind it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from turbopair.triangle_attention import contract, cuda

BF16, F32 = torch.bfloat16, torch.float32
# Places in the arguments, as in triangle_attention.h.
SIZES, SCALE, Q, K, V, DOUT, BIAS, MASK, RESULTS = slice(0, 11), 11, 12, 17, 22, 27, 32, 37, slice(41, 48)
MULTIPROCESSORS, WORKSPACE = 132, 512


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The unpacked arguments of every call to come."""
    seen: list[tuple[Any, ...]] = []

    def run(packed: bytes, stream: int) -> int:
        assert stream == 7
        seen.append(cuda._ARGS.unpack(packed))
        return 0

    library = SimpleNamespace(forward=run, backward=run, workspace=lambda packed, backward: WORKSPACE)
    monkeypatch.setattr(cuda, "_functions", lambda: library)
    monkeypatch.setattr(cuda, "_sm_count", lambda index: MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # what the index of a CPU tensor's device is
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    cuda._plan.cache_clear()
    return seen


def tensors(dim: int = 16, dtype: torch.dtype = BF16, offset: int = 0) -> tuple[Tensor, ...]:
    """q, k, v and dout of one shape, each `offset` elements behind an aligned place, and a bias."""
    shape = (1, 3, 5, 2, dim)
    size = 3 * 5 * 2 * dim
    inputs = [torch.randn(size + offset).to(dtype)[offset:].view(shape) for _ in range(4)]
    return (*inputs, torch.randn(1, 2, 5, 5).to(dtype))


def pointers(arguments: tuple[Any, ...]) -> list[int]:
    return [arguments[place] for place in (Q, K, V, DOUT)]


def test_arguments_of_both_directions(calls: list[tuple[Any, ...]]) -> None:
    q, k, v, dout, bias = tensors()
    mask = torch.ones(1, 3, 5, dtype=torch.bool)
    out, residual, lse = cuda.forward(q, k, v, bias, mask, 0.3, "exact")
    gradients = cuda.backward(dout, q, k, v, bias, mask, out, residual, lse, 0.3, "exact")
    forward, backward = calls
    for arguments in calls:
        assert arguments[SIZES] == (1, 3, 5, 5, 2, 16, 1, 1, 3, 7, MULTIPROCESSORS) and arguments[SCALE] == 0.3
        for place, tensor in ((Q, q), (K, k), (V, v), (BIAS, bias), (MASK, mask)):
            assert arguments[place : place + 1 + min(tensor.dim(), 4)] == (tensor.data_ptr(), *tensor.stride()[:4])
        assert arguments[48] and arguments[49] == WORKSPACE
    assert forward[DOUT : DOUT + 5] == (0,) * 5
    assert backward[DOUT : DOUT + 5] == (dout.data_ptr(), *dout.stride()[:4])
    saved = (out.data_ptr(), residual.data_ptr(), lse.data_ptr())
    assert forward[RESULTS] == (*saved, 0, 0, 0, 0)
    assert backward[RESULTS] == (*saved, *(gradient.data_ptr() for gradient in gradients))


def test_alignment_is_asked_at_every_call(calls: list[tuple[Any, ...]]) -> None:
    """Calls alike in all but their pointers share a plan, and only the one that needs a copy gets one."""
    for offset in (0, 1, 0, 8, 4):
        *inputs, bias = tensors(offset=offset)
        q, k, v, dout = inputs
        cuda.backward(dout, q, k, v, bias, None, *cuda.forward(q, k, v, bias, None, 0.3, "plain"), 0.3, "plain")
        forward, backward = calls[-2:]
        assert not any(pointer % 16 for pointer in pointers(backward))
        given = [tensor.data_ptr() for tensor in inputs]
        assert (pointers(backward) == given) == (offset % 8 == 0)
        assert pointers(forward)[:3] == given[:3] or offset % 8
    assert cuda._plan.cache_info().misses == 2


def test_strides_that_differ_between_calls(calls: list[tuple[Any, ...]]) -> None:
    q, k, v, _, bias = tensors()
    ending = q.transpose(1, 2).contiguous().transpose(1, 2)
    backwards = q[:, :1].expand_as(q)  # stride 0, which the bulk copies cannot read
    for given, in_place in ((q, True), (ending, True), (backwards, False), (q, True)):
        out, _, _ = cuda.forward(given, k, v, bias, None, 0.3, "paper")
        assert (calls[-1][Q] == given.data_ptr()) == in_place
        assert calls[-1][Q + 1 : Q + 5] == (given if in_place else q).stride()[:4]
        assert out.is_contiguous()


@pytest.mark.parametrize(("dim", "padded"), [(7, 16), (24, 32)])
def test_padding_is_taken_off_again(calls: list[tuple[Any, ...]], dim: int, padded: int) -> None:
    q, k, v, dout, bias = tensors(dim)
    out, residual, lse = cuda.forward(q, k, v, bias, None, 0.3, "paper")
    *gradients, dbias = cuda.backward(dout, q, k, v, bias, None, out, residual, lse, 0.3, "paper")
    assert [arguments[5] for arguments in calls] == [padded, padded]
    assert all(tensor.shape == q.shape and tensor.is_contiguous() for tensor in (out, residual, *gradients))
    assert dbias.shape == bias.shape


def test_results_own_their_memory(calls: list[tuple[Any, ...]]) -> None:
    """Kept by the user or for the backward, a result must not keep another alive."""
    q, k, v, dout, bias = tensors()
    saved = cuda.forward(q, k, v, bias, None, 0.3, "paper")
    results = (*saved, *cuda.backward(dout, q, k, v, bias, None, *saved, 0.3, "paper"))
    assert all(result._base is None and result.untyped_storage().nbytes() == result.nbytes for result in results)
    assert len({result.untyped_storage().data_ptr() for result in results}) == len(results)


def test_fp32_is_read_wherever_it_lies(calls: list[tuple[Any, ...]]) -> None:
    q, k, v, _, bias = tensors(dtype=F32, offset=1)
    _, residual, _ = cuda.forward(q, k, v, bias, None, 0.3, "paper")
    assert pointers(calls[0])[:3] == [q.data_ptr(), k.data_ptr(), v.data_ptr()] and calls[0][RESULTS][1] == 0
    assert residual.shape == (0,)


def test_a_usual_call_is_accepted_at_first_sight() -> None:
    """The host time of a call counts on it; that nothing else is accepted there, the refusals of test_attention_contract.py say."""
    q, k, v, _, bias = tensors()
    assert contract._are_usual(q, k, v, bias[:, None], None)
    assert contract._are_usual(q, k, v, bias[:, None].float(), torch.ones(1, 3, 1, 1, 5, dtype=torch.bool))
