"""The public door: validate, flatten the batch prefix, call the operator.

Nothing is allocated before the arguments are accepted. Batch dimensions are flattened by views where the strides allow it;
otherwise PyTorch's ``reshape`` copies.
"""

import math

import torch
from torch import Tensor

from turbopair import native
from turbopair.triangle_attention import ops
from turbopair.triangle_attention.contract import DEFAULT_PRECISION, problem
from turbopair.triangle_attention.shared_bias import one_row


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    precision: str | None = None,
) -> str | None:
    """Return None if :func:`triangle_attention` accepts these arguments, else the reason: the text it would raise."""
    refusal = problem(q, k, v, bias, mask, scale, precision) or _device_problem(q.device)
    return None if refusal is None else str(refusal)


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    precision: str | None = None,
) -> Tensor:
    """Attention of each slice with one bias shared by all: ``softmax(scale * q k^T + bias + mask) v``, differentiable once.

    Args:
        q: ``[*B, I, Nq, H, D]``, bf16 or fp32 (fp64 on the CPU), D <= 64. Any strides; a last dimension that is not
            contiguous is copied. ``*B`` is any number of batch dimensions, also none.
        k: ``[*B, I, Nk, H, D]``, the dtype of q.
        v: ``[*B, I, Nk, H, D]``, the dtype of q.
        bias: ``[*B, 1, H, Nq, Nk]``, bf16 or fp32, any strides; a batch dimension may be 1 and is then shared. Its gradient
            is summed over slices in fp32 and returned in its dtype. An ``.expand()`` over I (stride 0) is the same bias and
            is never copied; its gradient is the same sum. When it requires a gradient and is not directly the ``.expand()``
            of a tensor with memory of its own (but of a permuted view, say), and under ``torch.compile``, autograd makes
            one tensor of the expanded shape in the backward: pass the unexpanded bias to avoid that.
        mask: ``[*B, I, 1, 1, Nk]`` or None; bool (True = attend) or additive bf16/fp32; a batch or I extent of 1 is shared.
            False, and any additive value <= -1e8, excludes the key exactly. No gradient.
        scale: a finite number; None means ``1/sqrt(D)``.
        precision: a name in :data:`turbopair.PRECISIONS`; None means :data:`turbopair.DEFAULT_PRECISION`. It matters for
            bf16 inputs; fp32 and fp64 inputs are computed in their own dtype whatever it says.

    Returns:
        ``[*B, I, Nq, H, D]``, contiguous, in q's dtype. A slice all of whose keys are masked gives the mean of v over its
        keys, and no gradient to q, k and bias. ``*B`` and I may be 0; Nq, Nk, H and D may not.

    Raises:
        TypeError, ValueError: the arguments contradict the above; the message names the argument, what was given and what is
            accepted.
        NotImplementedError: sensible, but outside the supported range (dtype, D, device).
        turbopair.NativeUnavailable: CUDA tensors, and the kernel library cannot be used; the message says why.

    Autocast is ignored: the tensors are used in the dtypes they have. A second derivative and a forward-mode one raise NotImplementedError.
    """
    refusal = problem(q, k, v, bias, mask, scale, precision)
    # Under torch.compile the device is asked at run time, by the operator: the answer comes through ctypes, which cannot be traced.
    if refusal is None and not torch.compiler.is_compiling():
        refusal = _device_problem(q.device)
    if refusal is not None:
        raise refusal
    shape, batch = q.shape, q.shape[:-4]
    flat = math.prod(batch)
    bias = one_row(bias)
    if len(batch) != 1 or bias.shape[0] != flat:
        bias = bias.expand(*batch, *bias.shape[-3:]).reshape(flat, *bias.shape[-3:])
    if mask is not None:
        if mask.shape[:-3] != shape[:-3]:
            mask = mask.expand(*shape[:-3], 1, 1, mask.shape[-1])
        mask = mask.reshape(flat, shape[-4], mask.shape[-1])
    if len(batch) != 1:
        q, k, v = (tensor.reshape(flat, *tensor.shape[-4:]) for tensor in (q, k, v))
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    out = ops.forward(q, k, v, bias, mask, 1.0 / math.sqrt(shape[-1]) if scale is None else float(scale), precision or DEFAULT_PRECISION)
    return out if len(batch) == 1 else out.reshape(shape)


def _device_problem(device: torch.device) -> Exception | None:
    """Why the kernels cannot run on the tensors' device, or None; CPU and meta tensors need no kernel."""
    if device.type != "cuda":
        return None
    try:
        native.require(device)
    except native.NativeUnavailable as error:
        return error
    return None
