"""Triangle multiplication's Gluon kernels run as the Python they are, on the CPU, against the emulation.

Run `python -m tests.support.gluon_on_cpu`.

In the place of Triton stand a few lines of PyTorch, and asynchrony at its worst: a bulk copy into shared memory arrives when it is waited
for and leaves NaN there until then; one out of shared memory reads it as late as the waits allow; a product reads shared operands when
it is waited for. Barriers check bytes, parity and that something is under way. What this cannot show: layouts, and races between the
threads of a stream.
"""

import builtins
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
Constants = dict[str, Any]
PACKAGE = "turbopair.triangle_multiplication"
STREAM_KERNELS = {
    "input_kernels": ("input_forward", "input_backward"),
    "output_kernels": ("output_forward", "output_backward"),
    "gradient_kernels": ("weight_gradients",),
}


class Integer(int):
    """What a scalar of a kernel is: an int with a dtype to convert to."""

    def to(self, dtype: Any) -> "Integer":
        return self


def _operator(name: str) -> None:
    plain = getattr(int, name)

    def method(self: Integer, other: Any) -> Any:
        if isinstance(other, (Tensor, float)):
            return NotImplemented
        result = plain(self, int(other))
        return Integer(result) if type(result) is int else result

    setattr(Integer, name, method)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "xor", "rxor"):
    _operator(f"__{_name}__")


class Values(Tensor):
    """A tensor in registers; layouts are not simulated."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(layout=None)


def _values(tensor: Tensor) -> Any:
    return tensor.as_subclass(Values)


class Pointer:
    def __init__(self, memory: Tensor, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, offsets

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.offsets + other)

    def at(self, mask: Any) -> tuple[Tensor, Tensor]:
        offsets = torch.as_tensor(self.offsets)
        mask = torch.ones_like(offsets, dtype=torch.bool) if mask is None else torch.broadcast_to(mask, offsets.shape)
        assert ((offsets >= 0) & (offsets < self.memory.numel()))[mask].all(), "outside the tensor"
        return offsets, mask


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.layout = data, None
        self.numel, self.shape = data.numel(), list(data.shape)

    def index(self, index: int) -> "Shared":
        assert 0 <= index < self.shape[0]
        return Shared(self.data[int(index)])

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.data.view(*shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        assert start + length <= self.shape[dim]
        return Shared(self.data.narrow(dim, start, length))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Shared":
        return Shared(self.data.view(*shape))

    def load(self, layout: Any) -> Any:
        return _values(self.data.clone())

    def store(self, value: Tensor) -> None:
        assert value.shape == self.data.shape and value.dtype == self.data.dtype
        self.data.copy_(value)


class Barrier:
    def __init__(self) -> None:
        self.completed, self.expected = 0, 0
        self.copies: list[tuple[Box, list[int], Shared]] = []


class Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, index: int) -> Barrier:
        return self.barriers[int(index)]


class Box:
    """A tensor and the extents of a bulk copy of a part of it."""

    layout = None

    def __init__(self, tensor: Tensor, box: list[int]) -> None:
        self.tensor, self.box = tensor, box

    def overlap(self, place: list[int], buffer: Shared) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        assert buffer.shape == self.box and min(place) >= 0
        sizes = [max(0, min(extent, size - at)) for at, extent, size in zip(place, self.box, self.tensor.shape, strict=True)]
        return tuple(slice(at, at + size) for at, size in zip(place, sizes, strict=True)), tuple(slice(0, size) for size in sizes)


class Copies:
    """`tma` and `mbarrier`."""

    MBarrierLayout = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.leaving: list[tuple[Box, list[int], Shared]] = []

    def init(self, barrier: Barrier, count: int) -> None:
        assert count == 1

    def expect(self, barrier: Barrier, size: int, pred: Any = True) -> None:
        if pred:
            assert not barrier.expected, "expected twice in a phase"
            barrier.expected = size

    def async_copy_global_to_shared(self, tensor: Box, place: list[int], barrier: Barrier, buffer: Shared, pred: Any = True) -> None:
        if pred:
            buffer.data.fill_(torch.nan)
            barrier.copies.append((tensor, [int(at) for at in place], buffer))

    def wait(self, barrier: Barrier, phase: int, pred: Any = True) -> None:
        if not pred:
            return
        if barrier.expected:
            assert sum(2 * buffer.numel for _, _, buffer in barrier.copies) == barrier.expected
            for tensor, place, buffer in barrier.copies:
                there, here = tensor.overlap(place, buffer)
                buffer.data.zero_()
                buffer.data[here] = tensor.tensor[there]
            barrier.copies, barrier.expected = [], 0
            barrier.completed += 1
        assert barrier.completed and (barrier.completed - 1) % 2 == phase, "waits for ever"

    def async_copy_shared_to_global(self, tensor: Box, place: list[int], buffer: Shared) -> None:
        self.leaving.append((tensor, [int(at) for at in place], buffer))

    def store_wait(self, pending: int) -> None:
        while len(self.leaving) > pending:
            tensor, place, buffer = self.leaving.pop(0)
            there, here = tensor.overlap(place, buffer)
            tensor.tensor[there] = buffer.data[here]


class Product:
    """A product under way."""

    def __init__(self, left: Any, right: Any, sums: Any) -> None:
        self.left, self.right, self.sums = left, right, sums

    def value(self) -> Any:
        left, right = (operand.data if isinstance(operand, Shared) else operand for operand in (self.left, self.right))
        product = left.float() @ right.float()
        return _values(product if self.sums is None else product + _finished(self.sums))


def _finished(value: Any) -> Any:
    return value.value() if isinstance(value, Product) else value


def _product(left: Any, right: Any, sums: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    return Product(left, right, sums if use_acc else None)


def _product_wait(pending: int, deps: list[Any]) -> Any:
    assert pending == 0
    values = [_finished(value) for value in deps]
    return values[0] if len(values) == 1 else values


def _where(condition: Any, first: Any, second: Any) -> Any:
    if isinstance(condition, Tensor):
        return torch.where(condition, first, second)
    return Integer(first if condition else second)


def _allocate(dtype: Any, shape: list[int], layout: Any, value: Any = None) -> Any:
    if dtype is torch.int64:
        return Barriers(shape[0])
    shared = Shared(torch.full(shape, torch.nan, dtype=dtype))
    if value is not None:
        shared.store(value)
    return shared


def _load(pointer: Pointer, mask: Any = None, other: float = 0) -> Any:
    offsets, mask = pointer.at(mask)
    return _values(torch.where(mask, pointer.memory[torch.where(mask, offsets, 0)], torch.tensor(other, dtype=pointer.memory.dtype)))


def _store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    offsets, mask = pointer.at(mask)
    pointer.memory[offsets[mask]] = torch.broadcast_to(value, offsets.shape)[mask].as_subclass(Tensor)


def install(copies: Copies, cta: list[int]) -> None:
    """Modules in the place of Triton's; `cta` is the number of the CTA that runs, and how many there are."""
    gl = types.ModuleType("gl")
    layouts = ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "NVMMASharedLayout", "SwizzledSharedLayout", "SliceLayout")
    functions: dict[str, Any] = {name: lambda *args, **kwargs: None for name in (*layouts, "static_assert", "barrier")}
    functions |= {name: getattr(torch, name) for name in ("bfloat16", "float32", "int64", "int32", "rsqrt")}
    functions |= {"constexpr": lambda value: value, "static_range": range, "where": _where, "load": _load, "store": _store}
    functions |= {"program_id": lambda axis: Integer(cta[0]), "num_programs": lambda axis: Integer(cta[1])}
    functions |= {"allocate_shared_memory": _allocate, "arange": lambda first, last, layout: _values(torch.arange(first, last))}
    functions |= {"zeros": lambda shape, dtype, layout: _values(torch.zeros(shape, dtype=dtype))}
    functions |= {"full": lambda shape, value, dtype, layout: _values(torch.full(shape, value, dtype=dtype))}
    functions |= {"sum": lambda x, axis: x.sum(axis), "max": lambda x, axis: x.amax(axis)}
    functions |= {"reduce": lambda xs, axis, function: tuple(x.sum(axis) for x in xs), "split": lambda x: (x[..., 0], x[..., 1])}
    functions |= {"convert_layout": lambda x, layout, assert_trivial=False: x}

    def warp_specialize(streams: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        for function, arguments in streams:
            function(*arguments)
            copies.store_wait(0)

    gl.__dict__.update(functions, warp_specialize=warp_specialize)
    gluon = types.ModuleType("gluon")
    gluon.__dict__.update(
        jit=lambda function=None, **kwargs: function or (lambda given: given), constexpr_function=lambda function: function
    )
    gluon.__dict__["language"] = gl
    hopper = types.ModuleType("hopper")
    hopper.__dict__.update(fence_async_shared=lambda: None, mbarrier=copies, tma=copies)
    hopper.__dict__.update(warpgroup_mma=_product, warpgroup_mma_wait=_product_wait)
    root, experimental, nvidia = (types.ModuleType(name) for name in ("triton", "experimental", "nvidia"))
    experimental.__dict__["gluon"] = gluon
    path = "triton.experimental.gluon.language"
    sys.modules |= {"triton": root, "triton.experimental": experimental, "triton.experimental.gluon": gluon, path: gl}
    sys.modules |= {f"{path}.nvidia": nvidia, f"{path}.nvidia.hopper": hopper}


class Kernels:
    """In the place of `cuda._Kernels`. The small kernels, plain Triton, are replaced by what they mean."""

    def __init__(self, copies: Copies, cta: list[int]) -> None:
        self.copies, self.cta = copies, cta
        shared = importlib.import_module(f"{PACKAGE}.tile_kernels").__dict__
        shared.update(sigmoid=torch.sigmoid, opaque_zero=lambda x: Integer(0))
        for file, names in STREAM_KERNELS.items():
            module = importlib.import_module(f"{PACKAGE}.{file}").__dict__
            module["range"] = lambda *bounds: map(Integer, builtins.range(*bounds))
            for name in names:
                setattr(self, name, self._kernel(module[name]))

    def _kernel(self, function: Callable[..., None]) -> Callable[..., None]:
        def launch(
            key: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], options: Any, stream: Any
        ) -> None:
            given = [
                Box(value[0].as_strided(value[1].shape, value[1].strides), value[1].block_shape)
                if isinstance(value, tuple)
                else Pointer(value.view(-1) if value.is_contiguous() else value)
                if isinstance(value, Tensor)
                else Integer(value)
                if type(value) is int
                else value
                for value in arguments
            ]
            for cta in range(grid[0]):
                self.cta[:] = cta, grid[0]
                function(*given, *constants.values())
                self.copies.store_wait(0)

        return launch

    def pack_weights(self, key: Any, grid: Any, arguments: Arguments, constants: Constants, options: Any, stream: Any) -> None:
        niw, nib, a_p, a_g, b_p, b_g, now, nob, out, gate, packed, vectors = arguments
        c, padded = constants["C"], constants["CP"]
        packed.zero_(), vectors.zero_()
        for slot, matrix in enumerate((a_p, a_g, b_p, b_g, gate, out)):
            packed.view(6, padded, padded)[slot, :c, :c] = matrix
        for slot, vector in enumerate((niw, nib, now, nob)):
            vectors.view(4, padded)[slot, :c] = vector

    def reduce_matrices(
        self, key: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any], options: Any, stream: Any
    ) -> None:
        matrices, sums, packed, vectors, norms, a_p, a_g, b_p, b_g, out, gate, wide, narrow = arguments
        c, padded = constants["C"], constants["CP"]
        first = 0
        for which, gradient in enumerate((a_p, a_g, b_p, b_g, gate, out)):
            last = first + (wide if which < 4 else narrow)
            g, d = matrices.view(-1, c, c)[first:last].sum(0), sums.view(-1, c)[first:last].sum(0)[:, None]
            weight, bias = vectors.view(4, padded)[2 if which == 5 else 0, :c], vectors.view(4, padded)[3 if which == 5 else 1, :c]
            gradient.copy_(g * weight + d * bias)
            w = packed.view(6, padded, padded)[which, :c, :c].float()
            norms.view(6, c, 2, c)[which, :, 0], norms.view(6, c, 2, c)[which, :, 1] = w * g, w * d
            first = last

    def reduce_norms(self, key: Any, grid: Any, arguments: Arguments, constants: Constants, options: Any, stream: Any) -> None:
        norms, *gradients = arguments
        c = constants["C"]
        of_z, of_x = norms.view(6, c, 2, c)[:5].sum((0, 1)), norms.view(6, c, 2, c)[5].sum(0)
        for gradient, value in zip(gradients, (*of_z, *of_x), strict=True):
            gradient.copy_(value)


def main() -> None:
    """A few shapes, masks, directions and numbers of multiprocessors; unwritten memory holds NaN."""
    copies, cta, sms = Copies(), [0, 1], [1]
    importlib.import_module("torch._dynamo")  # looks for Triton: before it is replaced
    install(copies, cta)
    cuda, emulation = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("cuda", "emulation"))
    kernels = Kernels(copies, cta)

    def product(out: Tensor, left: Tensor, right: Tensor) -> None:
        for index in range(out.shape[0]):
            out[index].copy_(left[index].float() @ right[index].float())

    changes = {"_kernels": lambda: kernels, "_sm_count": lambda index: sms[0], "current_stream": lambda index: 0, "_product": product}
    cuda.__dict__.update(changes)
    torch.cuda.current_device = lambda: None  # type: ignore[assignment, return-value]
    empty = torch.empty
    torch.empty = lambda *shape, **kwargs: empty(*shape, **kwargs).fill_(torch.nan)  # type: ignore[assignment]
    torch.empty_like = lambda other, **kwargs: empty(other.shape, dtype=other.dtype).fill_(torch.nan)  # type: ignore[assignment]
    cases = (
        (37, 128, 1, None, True, 2),
        (70, 96, 2, torch.bool, False, 7),
        (33, 32, 1, None, False, 3),
        (65, 64, 1, torch.float32, True, 40),
    )
    for n, c, batch, mask_type, outgoing, sms[0] in cases:
        random = torch.Generator().manual_seed(n)
        z, dout = (torch.randn(batch, n, n, c, generator=random).bfloat16() for _ in range(2))
        z = z.transpose(1, 2)
        mask = None if mask_type is None else (torch.rand(batch, n, n, generator=random) > 0.3).to(mask_type)
        weights = [
            torch.randn(c, generator=random) if i in (0, 1, 6, 7) else torch.randn(c, c, generator=random) / c**0.5 for i in range(10)
        ]
        out, a, b, x = cuda.forward(z, mask, weights, outgoing, 1e-5, True)
        dz, gradients = cuda.backward(dout, z, mask, weights, a, b, x, outgoing, 1e-5)
        expected, a_, b_, x_ = emulation.forward(z, mask, weights, outgoing, 1e-5)
        expected_dz, expected_gradients = emulation.backward(dout, z, mask, weights, a_, b_, x_, outgoing, 1e-5)
        for which, (value, other) in enumerate(zip((out, dz, *gradients), (expected, expected_dz, *expected_gradients), strict=True)):
            error = (value.double() - other.double()).norm() / other.double().norm()
            # Weight gradients sum other roundings of LN(z) and LN(x) than the emulation.
            assert error < (1e-3 if which < 2 else 6e-3), (n, c, which, error)
        assert not any(operand.view(batch, n, c, -1)[..., n:].any() for operand in (a, b)), "padding columns"
    print("agreed")


if __name__ == "__main__":
    main()
