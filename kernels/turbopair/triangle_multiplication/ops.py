"""The two torch operators behind the interface: forward and backward, on canonical tensors.

    turbopair::triangle_multiplication_forward(z, mask?, weights[10], outgoing, eps, save) -> (out, a, b, x)
    turbopair::triangle_multiplication_backward(dout, z, mask?, weights[10], a, b, x, outgoing, eps) -> (dz, dweights[10])

z ``[B, N, N, C]`` with C contiguous, mask None or ``[B, N, N]``, weights in the order of ``TriangleMultiplicationWeights``. out is
contiguous in z's dtype. a, b and x are what the backward needs, ``[B, C, N, P]`` with P = N rounded up to a multiple of 8, in z's dtype
(x of bf16 z in ``X_DTYPE``); columns N..P of a and b are zero. They are empty when ``save`` is False. On CUDA
their memory holds ``[B, N, C, P]`` under that shape: they are for the backward operator, not to be indexed. Gradients are contiguous, in
the dtype of what they belong to.

On the CPU bf16 runs the emulation of the kernels, fp32 and fp64 plain arithmetic in their own dtype; on CUDA bf16 runs the kernels and
fp32 plain arithmetic. Implementations are registered for dispatch keys directly (not through ``torch.library.custom_op``): a call costs
microseconds of host time, and a training step makes hundreds.
"""

from typing import Any

import torch
from torch import Tensor

from turbopair.native import NativeUnavailable
from turbopair.refusals import refuse_forward_mode
from turbopair.triangle_multiplication import emulation, reference
from turbopair.triangle_multiplication.contract import X_DTYPE, TriangleMultiplicationWeights, pitch

_library = torch.library.Library("turbopair", "FRAGMENT")
_library.define(
    "triangle_multiplication_forward(Tensor z, Tensor? mask, Tensor[] weights, bool outgoing, float eps, bool save)"
    " -> (Tensor out, Tensor a, Tensor b, Tensor x)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "triangle_multiplication_backward(Tensor dout, Tensor z, Tensor? mask, Tensor[] weights, Tensor a, Tensor b, Tensor x, bool outgoing,"
    " float eps) -> (Tensor dz, Tensor[] dweights)",
    tags=torch.Tag.pt2_compliant_tag,
)
_forward_op = torch.ops.turbopair.triangle_multiplication_forward.default
_backward_op = torch.ops.turbopair.triangle_multiplication_backward.default

_Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
_Gradients = tuple[Tensor, list[Tensor]]


def forward(z: Tensor, mask: Tensor | None, weights: TriangleMultiplicationWeights, outgoing: bool, eps: float) -> Tensor:
    """Call the forward operator on canonical tensors and return out, differentiable in z and the weights."""
    if torch.compiler.is_compiling():
        return _forward_op(z, mask, list(weights), outgoing, eps, _differentiated(z, weights))[0]
    # Where the dispatcher's first stop would be; going there directly saves host time.
    return _forward_autograd(z, mask, list(weights), outgoing, eps, False)[0]


def _differentiated(z: Tensor, weights: tuple[Tensor, ...] | list[Tensor]) -> bool:
    return torch.is_grad_enabled() and (z.requires_grad or any(weight.requires_grad for weight in weights))


def _kept(z: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised a, b and x."""
    batch, n, _, channels = z.shape
    shape = (batch, channels, n, pitch(n)) if save else (0,)
    return z.new_empty(shape), z.new_empty(shape), z.new_empty(shape, dtype=X_DTYPE if z.dtype == torch.bfloat16 else z.dtype)


@torch.library.register_fake("turbopair::triangle_multiplication_forward", lib=_library)
def _forward_fake(z: Tensor, mask: Tensor | None, weights: list[Tensor], outgoing: bool, eps: float, save: bool) -> _Outputs:
    return z.new_empty(z.shape), *_kept(z, save)


@torch.library.register_fake("turbopair::triangle_multiplication_backward", lib=_library)
def _backward_fake(dout: Tensor, z: Tensor, mask: Tensor | None, weights: list[Tensor], *rest: Any) -> _Gradients:
    return z.new_empty(z.shape), [weight.new_empty(weight.shape) for weight in weights]


def _forward_plain(z: Tensor, mask: Tensor | None, weights: list[Tensor], outgoing: bool, eps: float, save: bool) -> _Outputs:
    with torch.autocast(z.device.type, enabled=False):
        if z.dtype == torch.bfloat16:
            out, *kept = emulation.forward(z, mask, weights, outgoing, eps)
        else:
            out, *kept = reference.forward(z, mask, weights, outgoing, eps, z.dtype)
    return out, *(kept if save else _kept(z, False))


def _backward_plain(
    dout: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    a: Tensor,
    b: Tensor,
    x: Tensor,
    outgoing: bool,
    eps: float,
) -> _Gradients:
    with torch.autocast(z.device.type, enabled=False):
        if z.dtype == torch.bfloat16:
            return emulation.backward(dout, z, mask, weights, a, b, x, outgoing, eps)
        dz, dweights = reference.backward(dout, z, mask, weights, a, b, x, outgoing, eps, z.dtype)
    return dz, [gradient.to(weight.dtype) for gradient, weight in zip(dweights, weights, strict=True)]


def _forward_cuda(z: Tensor, mask: Tensor | None, weights: list[Tensor], outgoing: bool, eps: float, save: bool) -> _Outputs:
    from turbopair.triangle_multiplication import cuda, devices

    reason = devices.supports(z.device)  # for callers that did not come through the interface: torch.compile, the operator itself
    if reason is not None:
        raise NativeUnavailable(reason)
    if z.numel() == 0 or z.dtype != torch.bfloat16:
        return _forward_plain(z, mask, weights, outgoing, eps, save)
    return cuda.forward(z, mask, weights, outgoing, eps, save)


def _backward_cuda(
    dout: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    a: Tensor,
    b: Tensor,
    x: Tensor,
    outgoing: bool,
    eps: float,
) -> _Gradients:
    if z.numel() == 0 or z.dtype != torch.bfloat16:
        return _backward_plain(dout, z, mask, weights, a, b, x, outgoing, eps)
    from turbopair.triangle_multiplication import cuda

    dz, dweights = cuda.backward(dout, z, mask, weights, a, b, x, outgoing, eps)
    return dz, list(dweights)


class _Multiplication(torch.autograd.Function):
    """Records the forward operator; its backward is one call of the backward operator. Takes the weights one by one: autograd does not
    look into lists."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, mask: Tensor | None, outgoing: bool, eps: float, save: bool, *weights: Tensor) -> _Outputs:
        with torch._C._AutoDispatchBelowAutograd():
            out, *kept = _forward_op(z, mask, list(weights), outgoing, eps, True)
        ctx.save_for_backward(z, mask, *kept, *weights)
        ctx.outgoing, ctx.eps = outgoing, eps
        # A caller who wants no a, b, x gets none, though this call keeps them for its backward.
        shown = tuple(kept) if save else _kept(z, False)
        ctx.mark_non_differentiable(*shown)
        ctx.set_materialize_grads(False)
        return out, *shown

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
        z, mask, a, b, x, *weights = ctx.saved_tensors
        if dout is None:
            return (None,) * (5 + len(weights))
        dz, dweights = _backward_op(dout, z, mask, weights, a, b, x, ctx.outgoing, ctx.eps)
        return dz, None, None, None, None, *dweights


class _Gradient(torch.autograd.Function):
    """The backward operator under autograd: computes the gradients, and refuses to be differentiated."""

    @staticmethod
    def forward(
        ctx: Any,
        dout: Tensor,
        z: Tensor,
        mask: Tensor | None,
        a: Tensor,
        b: Tensor,
        x: Tensor,
        outgoing: bool,
        eps: float,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            dz, dweights = _backward_op(dout, z, mask, list(weights), a, b, x, outgoing, eps)
        return dz, *dweights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "turbopair.triangle_multiplication was differentiated twice; accepted: first derivatives (for a gradient penalty use PyTorch's "
            "own operations in this layer)"
        )


def _forward_autograd(z: Tensor, mask: Tensor | None, weights: list[Tensor], outgoing: bool, eps: float, save: bool) -> _Outputs:
    refuse_forward_mode("triangle_multiplication", (z, *weights))
    if _differentiated(z, weights):
        return _Multiplication.apply(z, mask, outgoing, eps, save, *weights)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(z, mask, weights, outgoing, eps, save)


def _backward_autograd(
    dout: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    a: Tensor,
    b: Tensor,
    x: Tensor,
    outgoing: bool,
    eps: float,
) -> _Gradients:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (dout, z, a, b, x, *weights)):
        dz, *dweights = _Gradient.apply(dout, z, mask, a, b, x, outgoing, eps, *weights)
        return dz, dweights
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(dout, z, mask, weights, a, b, x, outgoing, eps)


for _name, _key, _implementation in (
    ("triangle_multiplication_forward", "CPU", _forward_plain),
    ("triangle_multiplication_forward", "CUDA", _forward_cuda),
    ("triangle_multiplication_forward", "Autograd", _forward_autograd),
    ("triangle_multiplication_backward", "CPU", _backward_plain),
    ("triangle_multiplication_backward", "CUDA", _backward_cuda),
    ("triangle_multiplication_backward", "Autograd", _backward_autograd),
):
    _library.impl(_name, _implementation, _key)
