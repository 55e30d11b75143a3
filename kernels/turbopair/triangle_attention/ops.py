"""The two torch operators behind the interface: forward and backward, on canonical tensors.

    turbopair::triangle_attention_forward(q, k, v, bias, mask?, scale, precision) -> (out, residual, lse)
    turbopair::triangle_attention_backward(dout, q, k, v, bias, mask?, out, residual, lse, scale, precision) -> (dq, dk, dv, dbias)

q ``[B, I, Nq, H, D]``, k and v ``[B, I, Nk, H, D]`` with D contiguous, bias ``[B, H, Nq, Nk]``, mask None or ``[B, I, Nk]``. out is
contiguous in q's dtype; residual is bf16 like out (empty for precision "plain" and for fp32 and fp64 inputs); lse is
``[B, I, H, Nq]`` fp32 (fp64 for fp64 inputs), natural logarithm. Gradients are contiguous, in the dtype of what they belong to;
dbias is ``[B, H, Nq, Nk]``.

On the CPU bf16 runs the emulation of the kernels, fp32 and fp64 plain arithmetic in their own dtype. Implementations are registered
for dispatch keys directly (not through ``torch.library.custom_op``): a call costs microseconds of host time, and a training step
makes hundreds.
"""

from typing import Any

import torch
from torch import Tensor

from turbopair import native
from turbopair.refusals import refuse_forward_mode
from turbopair.triangle_attention import emulation, reference
from turbopair.triangle_attention.contract import PRECISIONS

_library = torch.library.Library("turbopair", "FRAGMENT")
_library.define(
    "triangle_attention_forward(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, float scale, str precision)"
    " -> (Tensor out, Tensor residual, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "triangle_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, Tensor out, Tensor residual,"
    " Tensor lse, float scale, str precision) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    tags=torch.Tag.pt2_compliant_tag,
)
_forward_op = torch.ops.turbopair.triangle_attention_forward.default
_backward_op = torch.ops.turbopair.triangle_attention_backward.default

_Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, precision: str) -> Tensor:
    """Call the forward operator on canonical tensors and return out, differentiable in q, k, v and bias."""
    if torch.compiler.is_compiling():
        return _forward_op(q, k, v, bias, mask, scale, precision)[0]
    # Where the dispatcher's first stop would be; going there directly saves a fifth of the host time of a call.
    return _forward_autograd(q, k, v, bias, mask, scale, precision)[0]


def _has_residual(q: Tensor, precision: str) -> bool:
    return q.dtype == torch.bfloat16 and PRECISIONS[precision].residual


def _forward_outputs(q: Tensor, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised outputs of the forward operator."""
    batch, rows, queries, heads, _ = q.shape
    out = q.new_empty(q.shape)
    residual = q.new_empty(q.shape if _has_residual(q, precision) else (0,), dtype=torch.bfloat16)
    return out, residual, q.new_empty((batch, rows, heads, queries), dtype=_lse_dtype(q))


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.register_fake("turbopair::triangle_attention_forward", lib=_library)
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward_outputs(q, precision)


@torch.library.register_fake("turbopair::triangle_attention_backward", lib=_library)
def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *rest: Any) -> _Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), bias.new_empty(bias.shape)


def _forward_cpu(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast("cpu", enabled=False):
        if q.dtype == torch.bfloat16:
            return emulation.forward(q, k, v, bias, mask, scale, precision)
        out, lse = reference.forward(q, k, v, bias, mask, scale, q.dtype)
    return out, q.new_empty((0,), dtype=torch.bfloat16), lse


def _backward_cpu(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    residual: Tensor,
    lse: Tensor,
    scale: float,
    precision: str,
) -> _Gradients:
    with torch.autocast("cpu", enabled=False):
        if q.dtype == torch.bfloat16:
            return emulation.backward(dout, q, k, v, bias, mask, out, residual, lse, scale, precision)
        dq, dk, dv, dbias = reference.backward(dout, q, k, v, bias, mask, out, lse, scale, q.dtype)
    return dq, dk, dv, dbias.to(bias.dtype)


def _forward_cuda(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    native.require(q.device)  # for callers that did not come through the interface: torch.compile, the operator itself
    if q.numel() == 0:
        return _forward_outputs(q, precision)
    from turbopair.triangle_attention import cuda

    return cuda.forward(q, k, v, bias, mask, scale, precision)


def _backward_cuda(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    residual: Tensor,
    lse: Tensor,
    scale: float,
    precision: str,
) -> _Gradients:
    if q.numel() == 0:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), bias.new_zeros(bias.shape)
    from turbopair.triangle_attention import cuda

    return cuda.backward(dout, q, k, v, bias, mask, out, residual, lse, scale, precision)


class _Attention(torch.autograd.Function):
    """Records the forward operator; its backward is one call of the backward operator."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, precision: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, residual, lse = _forward_op(q, k, v, bias, mask, scale, precision)
        ctx.save_for_backward(q, k, v, bias, mask, out, residual, lse)
        ctx.scale, ctx.precision = scale, precision
        ctx.mark_non_differentiable(residual, lse)
        ctx.set_materialize_grads(False)
        return out, residual, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 7
        # Directly, as in `forward` above; compiled autograd traces this function and needs the operator.
        backward = _backward_op if torch.compiler.is_compiling() else _backward_autograd
        return (*backward(dout, *ctx.saved_tensors, ctx.scale, ctx.precision), None, None, None)


class _Gradient(torch.autograd.Function):
    """The backward operator under autograd: computes the gradients, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> _Gradients:
        with torch._C._AutoDispatchBelowAutograd():
            return _backward_op(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "turbopair.triangle_attention was differentiated twice; accepted: first derivatives (for a gradient penalty use PyTorch's own "
            "operations in this layer)"
        )


def _forward_autograd(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_forward_mode("triangle_attention", (q, k, v, bias))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or bias.requires_grad):
        return _Attention.apply(q, k, v, bias, mask, scale, precision)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(q, k, v, bias, mask, scale, precision)


def _backward_autograd(*args: Any) -> _Gradients:
    if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        return _Gradient.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*args)


for _name, _key, _implementation in (
    ("triangle_attention_forward", "CPU", _forward_cpu),
    ("triangle_attention_forward", "CUDA", _forward_cuda),
    ("triangle_attention_forward", "Autograd", _forward_autograd),
    ("triangle_attention_backward", "CPU", _backward_cpu),
    ("triangle_attention_backward", "CUDA", _backward_cuda),
    ("triangle_attention_backward", "Autograd", _backward_autograd),
):
    _library.impl(_name, _implementation, _key)
