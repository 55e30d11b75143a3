"""The public door: validate, flatten the batch prefix, call the operator.

Nothing is allocated before the arguments are accepted. Batch dimensions are flattened by views where the strides allow it;
otherwise PyTorch's ``reshape`` copies.
"""

import math

import torch
from torch import Tensor

from turbopair.native import NativeUnavailable
from turbopair.triangle_multiplication import ops
from turbopair.triangle_multiplication.contract import TriangleMultiplicationWeights, problem


def supports_multiplication(
    z: Tensor,
    mask: Tensor | None,
    weights: TriangleMultiplicationWeights,
    direction: str,
    eps: float = 1e-5,
) -> str | None:
    """Return None if :func:`triangle_multiplication` accepts these arguments, else the reason: the text it would raise."""
    refusal = problem(z, mask, weights, direction, eps) or _device_problem(z.device)
    return None if refusal is None else str(refusal)


def triangle_multiplication(
    z: Tensor,
    mask: Tensor | None,
    weights: TriangleMultiplicationWeights,
    direction: str,
    eps: float = 1e-5,
) -> Tensor:
    """The whole triangle multiplicative update of a pair tensor (AlphaFold 3, algorithms 12 and 13), differentiable once::

        zn = LN(z)      a = mask * sigmoid(zn a_g^T) * (zn a_p^T)      b = mask * sigmoid(zn b_g^T) * (zn b_p^T)
        outgoing: x[i,j] = sum_k a[i,k] b[j,k]      incoming: x[i,j] = sum_k a[k,i] b[k,j]
        result = sigmoid(zn gate^T) * (LN(x) out^T)

    Args:
        z: ``[*B, N, N, C]``, bf16 or fp32 (fp64 on the CPU), C in {32, 64, 96, 128}, N >= 1. Any strides; a last dimension that is
            not contiguous is copied. ``*B`` is any number of batch dimensions, also none.
        mask: ``[*B, N, N]`` or None; bool (True = keep) or a factor in bf16 or fp32; a batch dimension of 1 is shared. No gradient.
        weights: :class:`turbopair.TriangleMultiplicationWeights`, bf16 or fp32 in any mixture (fp64 also beside fp64 z); the hidden
            size is C. Beside bf16 z, matrices are rounded to bf16 where they enter a matrix product. Each gradient is summed in fp32
            (fp64 for fp64 z) and returned in its weight's dtype.
        direction: "outgoing" or "incoming".
        eps: of both LayerNorms; positive.

    Returns:
        ``[*B, N, N, C]``, contiguous, in z's dtype. ``*B`` may contain 0; N may not be 0.

    Raises:
        TypeError, ValueError: the arguments contradict the above; the message names the argument, what was given and what is
            accepted.
        NotImplementedError: sensible, but outside the supported range (dtype, C, device).
        turbopair.NativeUnavailable: CUDA tensors, and the kernels cannot be used there; the message says why.

    Autocast is ignored: the tensors are used in the dtypes they have. fp32 z on a CUDA device is computed by PyTorch's own operations
    in fp32, and PyTorch's TF32 setting holds for them. A second derivative and a forward-mode one raise
    NotImplementedError.
    """
    refusal = problem(z, mask, weights, direction, eps)
    # Under torch.compile the device is asked at run time, by the operator.
    if refusal is None and not torch.compiler.is_compiling():
        refusal = _device_problem(z.device)
    if refusal is not None:
        raise refusal
    shape, batch = z.shape, z.shape[:-3]
    flat = math.prod(batch)
    if mask is not None:
        if mask.shape != shape[:-1]:
            mask = mask.expand(shape[:-1])
        if len(batch) != 1:
            mask = mask.reshape(flat, *shape[-3:-1])
    if len(batch) != 1:
        z = z.reshape(flat, *shape[-3:])
    if z.stride(-1) != 1:
        z = z.contiguous()
    out = ops.forward(z, mask, weights, direction == "outgoing", float(eps))
    return out if len(batch) == 1 else out.reshape(shape)


def _device_problem(device: torch.device) -> Exception | None:
    """Why the kernels cannot run on the tensors' device, or None; CPU and meta tensors need no kernel."""
    if device.type != "cuda":
        return None
    from turbopair.triangle_multiplication import devices

    reason = devices.supports(device)
    return None if reason is None else NativeUnavailable(reason)
