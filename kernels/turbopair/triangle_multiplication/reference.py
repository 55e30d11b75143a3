"""The plain definition of triangle multiplication and of its gradients, in FP64 (or another dtype), on any device.

Canonical layout: z ``[B, N, N, C]``, mask None or ``[B, N, N]``, the ten weights in the order of
:class:`~turbopair.triangle_multiplication.contract.TriangleMultiplicationWeights`::

    zn = LN(z)      a = mask * sigmoid(zn a_g^T) * (zn a_p^T)      b = mask * sigmoid(zn b_g^T) * (zn b_p^T)
    outgoing: x[i,j] = sum_k a[i,k] b[j,k]      incoming: x[i,j] = sum_k a[k,i] b[k,j]      (a channel each)
    y = LN(x) out^T      g = sigmoid(zn gate^T)      result = g * y

a, b and x are kept channel-major, ``[B, C, N, P]`` with P = N rounded up to a multiple of 8 and zeros in columns N..P: the product is
then one batched matrix product, in which every row starts at an aligned address. Everything that is worked out for each pair goes by
chunks of rows, so that beside tensors of z's size only a bounded amount of memory is used.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from turbopair.triangle_multiplication.contract import TriangleMultiplicationWeights, pitch

CHUNK_BYTES = 1 << 26
"""Largest size of one tensor of a chunk of rows; about twenty of them exist at once."""

At = tuple[int, slice]
"""A batch index and a range of rows i."""


def reference(
    z: Tensor,
    mask: Tensor | None,
    weights: TriangleMultiplicationWeights,
    direction: str = "outgoing",
    eps: float = 1e-5,
    dout: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Compute the operator, and with dout also its gradients, in ``dtype`` from inputs of any floating dtype.

    Args:
        z, mask, weights: canonical layout (see the module), one device.
        direction: "outgoing" or "incoming".
        dout: ``[B, N, N, C]``, or None for the forward alone.

    Returns:
        ``out`` ``[B, N, N, C]``, and with dout ``dz`` and a gradient for each weight (``da_p`` ...); all of ``dtype``.
    """
    outgoing = direction == "outgoing"
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        out, a, b, x = forward(z, mask, weights, outgoing, eps, dtype)
        result = {"out": out}
        if dout is not None:
            dz, dweights = backward(dout, z, mask, weights, a, b, x, outgoing, eps, dtype)
            result |= {"dz": dz} | {f"d{name}": gradient for name, gradient in zip(weights._fields, dweights, strict=True)}
    return result


def forward(
    z: Tensor, mask: Tensor | None, weights: Sequence[Tensor], outgoing: bool, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, a, b, x) in ``dtype``; canonical layout."""
    w = TriangleMultiplicationWeights(*(weight.to(dtype) for weight in weights))
    out = torch.empty(z.shape, dtype=dtype, device=z.device)
    a, b = (channel_major(z, dtype) for _ in range(2))
    for at in chunks(z, dtype.itemsize):
        zn = affine(layer_norm(z[at].to(dtype), eps)[0], w.norm_in_weight, w.norm_in_bias)
        keep = mask_factor(mask, at, dtype)
        put(a, at, (zn @ w.a_g.T).sigmoid_().mul_(zn @ w.a_p.T).mul_(keep))
        put(b, at, (zn @ w.b_g.T).sigmoid_().mul_(zn @ w.b_p.T).mul_(keep))
    x = product(a, b, outgoing)
    for at in chunks(z, dtype.itemsize):
        zn = affine(layer_norm(z[at].to(dtype), eps)[0], w.norm_in_weight, w.norm_in_bias)
        xn = affine(layer_norm(take(x, at), eps)[0], w.norm_out_weight, w.norm_out_bias)
        out[at] = (zn @ w.gate.T).sigmoid_().mul_(xn @ w.out.T)
    return out, a, b, x


def backward(
    dout: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    x: Tensor,
    outgoing: bool,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor]]:
    """Return dz and the ten weight gradients in ``dtype`` from the saved a, b, x of :func:`forward`; canonical layout."""
    w = TriangleMultiplicationWeights(*(weight.to(dtype) for weight in weights))
    gradients = TriangleMultiplicationWeights(*(torch.zeros_like(weight) for weight in w))
    dx = channel_major(z, dtype)
    dz = torch.empty(z.shape, dtype=dtype, device=z.device)
    for at in chunks(z, dtype.itemsize):
        zn = affine(layer_norm(z[at].to(dtype), eps)[0], w.norm_in_weight, w.norm_in_bias)
        unit, scale = layer_norm(take(x, at), eps)
        xn = affine(unit, w.norm_out_weight, w.norm_out_bias)
        g, y, do = (zn @ w.gate.T).sigmoid_(), xn @ w.out.T, dout[at].to(dtype)
        dy, dgate = do * g, do * y * g * (1 - g)
        gradients.out.add_(rows(dy).T @ rows(xn))
        gradients.gate.add_(rows(dgate).T @ rows(zn))
        dxn = dy @ w.out
        gradients.norm_out_weight.add_(rows(dxn * unit).sum(0))
        gradients.norm_out_bias.add_(rows(dxn).sum(0))
        put(dx, at, layer_norm_backward(dxn * w.norm_out_weight, unit, scale))
        dz[at] = dgate @ w.gate  # of zn; the rest follows

    da, db = product_backward(dx, a, b, outgoing)
    for at in chunks(z, dtype.itemsize):
        unit, scale = layer_norm(z[at].to(dtype), eps)
        zn = affine(unit, w.norm_in_weight, w.norm_in_bias)
        keep = mask_factor(mask, at, dtype)
        dzn = dz[at]
        for side, projection, gate in ((da, "a_p", "a_g"), (db, "b_p", "b_g")):
            value, opening, d = zn @ getattr(w, projection).T, (zn @ getattr(w, gate).T).sigmoid_(), take(side, at) * keep
            for name, pre in ((projection, d * opening), (gate, d * value * opening * (1 - opening))):
                getattr(gradients, name).add_(rows(pre).T @ rows(zn))
                dzn = dzn + pre @ getattr(w, name)
        gradients.norm_in_weight.add_(rows(dzn * unit).sum(0))
        gradients.norm_in_bias.add_(rows(dzn).sum(0))
        dz[at] = layer_norm_backward(dzn * w.norm_in_weight, unit, scale)
    return dz, list(gradients)


# -- pieces shared with the emulation ----------------------------------------------------------------------------------


def chunks(z: Tensor, itemsize: int, limit: int | None = None) -> Iterator[At]:
    """Yield (batch index, range of rows i) such that a range of z takes at most ``limit`` bytes (or is one row)."""
    batch, n, _, channels = z.shape
    step = max(1, (CHUNK_BYTES if limit is None else limit) // (n * channels * itemsize))
    for b in range(batch):
        for start in range(0, n, step):
            yield b, slice(start, min(start + step, n))


def channel_major(z: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros ``[B, C, N, P]``."""
    batch, n, _, channels = z.shape
    return torch.zeros((batch, channels, n, pitch(n)), dtype=dtype, device=z.device)


def put(tensor: Tensor, at: At, values: Tensor) -> None:
    """Write ``[I, N, C]`` values to a range of rows of a channel-major tensor."""
    b, part = at
    tensor[b, :, part, : values.shape[1]] = values.permute(2, 0, 1)


def take(tensor: Tensor, at: At) -> Tensor:
    """Read a range of rows of a channel-major tensor as ``[I, N, C]``."""
    b, part = at
    return tensor[b, :, part, : tensor.shape[2]].permute(1, 2, 0)


def rows(values: Tensor) -> Tensor:
    """``[I, N, C]`` to ``[I * N, C]``."""
    return values.reshape(-1, values.shape[-1])


def mask_factor(mask: Tensor | None, at: At, dtype: torch.dtype) -> Tensor | float:
    """The mask of a range of rows, ``[I, N, 1]``, or 1."""
    return 1.0 if mask is None else mask[at].to(dtype).unsqueeze(-1)


def layer_norm(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (values - mean) * scale over the last dimension, and scale = (variance + eps)^-1/2 ``[..., 1]``."""
    centred = values - values.mean(-1, keepdim=True)
    scale = centred.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return centred.mul_(scale), scale


def layer_norm_backward(dunit: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """Gradient of the values from that of the normalised ones."""
    mean, slope = dunit.mean(-1, keepdim=True), (dunit * unit).mean(-1, keepdim=True)
    return (dunit - mean - unit * slope).mul_(scale)


def product(a: Tensor, b: Tensor, outgoing: bool) -> Tensor:
    """x ``[B, C, N, P]`` in the operands' dtype; columns N..P are zero."""
    n = a.shape[2]
    x = torch.zeros_like(a)
    a, b = a[..., :n], b[..., :n]
    x[..., :n] = a @ b.mT if outgoing else a.mT @ b
    return x


def product_backward(dx: Tensor, a: Tensor, b: Tensor, outgoing: bool) -> tuple[Tensor, Tensor]:
    """(da, db) of the product, without padding: ``[B, C, N, N]``."""
    dx, a, b = (tensor[..., : tensor.shape[2]] for tensor in (dx, a, b))
    return (dx @ b, dx.mT @ a) if outgoing else (b @ dx.mT, a @ dx)


def affine(unit: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The learned part of a LayerNorm."""
    return unit * weight + bias
