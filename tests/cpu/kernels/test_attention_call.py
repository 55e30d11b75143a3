"""What a call of the CUDA back end hands to the library: arguments, copies and allocations, with CPU tensors and nothing behind it."""

import contextlib
import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from turbopair.triangle_attention import contract, cuda

BF16, F32 = torch.bfloat16, torch.float32
# Places in the arguments, as in triangle_attention.h.
SIZES, SCALE, Q, K, V, DOUT, BIAS, MASK, RESULTS = slice(0, 11), 11, 12, 17, 22, 27, 32, 37, slice(41, 48)
TENSORS = 50  # behind the arguments: what they say of tensors, read while the call lasts and copies live
DTYPES = (None, BF16, F32, torch.bool)
MULTIPROCESSORS, WORKSPACE = 132, (512, 768)


def described(arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """The inputs as a kernel finds them: by pointers, strides and sizes."""
    batch, rows, queries, keys, heads, dim, dtype, bias_dtype, mask_dtype = arguments[:9]

    def read(place: int, code: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Tensor:
        strides = strides or (*arguments[place + 1 : place + 5], 1)[: len(shape)]
        size = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * (size * DTYPES[code].itemsize)).from_address(arguments[place])
        return torch.frombuffer(memory, dtype=DTYPES[code]).as_strided(shape, strides).clone()

    of_queries, of_keys = (batch, rows, queries, heads, dim), (batch, rows, keys, heads, dim)
    found = {name: read(place, dtype, shape) for name, place, shape in (("q", Q, of_queries), ("k", K, of_keys), ("v", V, of_keys))}
    found["bias"] = read(BIAS, bias_dtype, (batch, heads, queries, keys))
    if mask_dtype:
        found["mask"] = read(MASK, mask_dtype, (batch, rows, keys))
    if arguments[DOUT]:
        found["dout"] = read(DOUT, dtype, of_queries)
        contiguous = torch.empty(of_queries, device="meta").stride()
        found["out"] = read(RESULTS.start, dtype, of_queries, contiguous)
        if arguments[RESULTS.start + 1]:
            found["residual"] = read(RESULTS.start + 1, 1, of_queries, contiguous)
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The unpacked arguments of every call to come."""
    seen: list[tuple[Any, ...]] = []

    def run(packed: bytes, stream: int) -> int:
        assert stream == 7
        arguments = cuda._ARGS.unpack(packed)
        seen.append((*arguments, described(arguments)))
        return 0

    library = SimpleNamespace(forward=run, backward=run, workspace=lambda packed, backward: WORKSPACE[backward])
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
    for arguments, workspace in zip(calls, WORKSPACE, strict=True):
        assert arguments[SIZES] == (1, 3, 5, 5, 2, 16, 1, 1, 3, 7, MULTIPROCESSORS) and arguments[SCALE] == 0.3
        for place, tensor in ((Q, q), (K, k), (V, v), (BIAS, bias), (MASK, mask)):
            assert arguments[place : place + 1 + min(tensor.dim(), 4)] == (tensor.data_ptr(), *tensor.stride()[:4])
        assert arguments[48] and arguments[49] == workspace
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


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last dimension outermost": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "rows of odd length": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    "one row for all": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "dtype"), [(16, BF16), (24, BF16), (40, BF16), (16, F32), (1, F32)])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float64])
def test_the_arguments_describe_the_tensors(
    calls: list[tuple[Any, ...]], dim: int, dtype: torch.dtype, mask_dtype: torch.dtype, layout: str
) -> None:
    q, k, v, dout, bias = tensors(dim, dtype)
    whole = {"q": q, "k": k, "v": v, "dout": dout, "bias": bias, "mask": (torch.rand(1, 3, 5) > 0.5).to(mask_dtype)}
    whole |= {"out": torch.randn_like(q), "residual": torch.randn_like(q) if dtype == BF16 else torch.empty(0, dtype=BF16)}
    for changed in whole:
        given = {name: LAYOUTS[layout](tensor) if name == changed and tensor.numel() else tensor for name, tensor in whole.items()}
        q, k, v, dout, bias, mask, out, residual = given.values()
        _, _, lse = cuda.forward(q, k, v, bias, mask, 0.3, "paper")
        cuda.backward(dout, q, k, v, bias, mask, out, residual, lse, 0.3, "paper")
        forward, backward = (arguments[TENSORS] for arguments in calls[-2:])
        assert forward.keys() == {"q", "k", "v", "bias", "mask"}
        assert backward.keys() == {name for name, tensor in whole.items() if tensor.numel()}
        for name, tensor in (*forward.items(), *backward.items()):
            real, padding = tensor.split([given[name].shape[-1], tensor.shape[-1] - given[name].shape[-1]], -1)
            assert torch.equal(real, given[name].to(real.dtype)) and not padding.any(), (changed, name)
        if dtype == BF16 and dim <= 32:
            for arguments in calls[-2:]:
                for place in (Q, K, V, DOUT):
                    pointer, _, *strides = arguments[place : place + 5]
                    assert pointer % 16 == 0 and all(2 * stride % 16 == 0 for stride in strides), (changed, place)
                    assert pointer == 0 or all(strides), (changed, place)


def test_each_device_has_its_own_plan(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_sm_count", lambda index: 100 + index)
    for index in (0, 1, 0):
        with FakeTensorMode():  # makes tensors of devices that this machine has not
            q = torch.empty(1, 3, 5, 2, 16, dtype=BF16, device=f"cuda:{index}")
            plan = cuda._plan_of(q, q, q, torch.empty(1, 2, 5, 5, device=q.device), None, "paper")
        assert struct.unpack("<11q", plan.sizes)[-1] == 100 + index


def test_another_device_than_the_current_one(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is asked of the tensors' device, which is the current one while the kernels are launched."""
    events: list[Any] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Any:
        events.append(device)
        yield
        events.append(len(calls))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: {None: 7, 5: 8}[index])
    q, k, v, _, bias = tensors()
    cuda.forward(q, k, v, bias, None, 0.3, "paper")
    assert events == [q.device, 1]


def test_a_failed_launch_is_an_error(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(forward=lambda *_: 700, workspace=lambda *_: 0, error_string=lambda code: f"error {code}".encode())
    monkeypatch.setattr(cuda, "_functions", lambda: library)
    q, k, v, _, bias = tensors()
    with pytest.raises(RuntimeError, match=r"forward kernel failed \(code 700\): error 700"):
        cuda.forward(q, k, v, bias, None, 0.3, "paper")


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
    """The host time of a call counts on it; that nothing else is accepted there, test_attention_contract.py says."""
    q, k, v, _, bias = tensors()
    assert contract._are_usual(q, k, v, bias[:, None], None)
    assert contract._are_usual(q, k, v, bias[:, None].float(), torch.ones(1, 3, 1, 1, 5, dtype=torch.bool))
