"""The kernels' arithmetic for bf16 z in plain PyTorch: the same rounding points.

It lets the operator, and every experiment on it, run without a GPU, and it says what accuracy the kernels should reach. Its bits
are its own (a matrix product adds in another order than a tensor core); what it shares with the kernels is what decides the error:

* LayerNorms, sigmoids, gates and every sum in fp32; operands of matrix products rounded to bf16 (weights, LN(z), LN(x));
* a and b rounded to bf16, their product summed in fp32 and kept as ``X_DTYPE``; the result rounded to bf16 once;
* backward: LN(z), LN(x), pre-activations and gates as in the forward. Gradients that enter a matrix product are rounded to bf16 before
  it: of y, of the five pre-activations, of x, of a and of b. What is summed over pairs (weight gradients) is summed in fp32, those of
  the LayerNorms from unrounded terms; dz is rounded to bf16 once, a weight gradient to its weight's dtype.

Layout and formulas are those of :mod:`turbopair.triangle_multiplication.reference`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from turbopair.triangle_multiplication.contract import X_DTYPE, TriangleMultiplicationWeights
from turbopair.triangle_multiplication.reference import (
    affine,
    channel_major,
    chunks,
    layer_norm,
    layer_norm_backward,
    mask_factor,
    product,
    product_backward,
    put,
    rows,
    take,
)

_BF16, _F32 = torch.bfloat16, torch.float32


def forward(z: Tensor, mask: Tensor | None, weights: Sequence[Tensor], outgoing: bool, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out bf16 ``[B, N, N, C]``, a and b bf16 ``[B, C, N, P]``, x of ``X_DTYPE``, same shape)."""
    w = _operands(weights)
    out = torch.empty(z.shape, dtype=_BF16, device=z.device)
    a, b = (channel_major(z, _BF16) for _ in range(2))
    for at in chunks(z, _F32.itemsize):
        _, _, zn = _normalise(z[at], w.norm_in_weight, w.norm_in_bias, eps)
        keep = mask_factor(mask, at, _F32)
        put(a, at, (zn @ w.a_g.T).sigmoid_().mul_(zn @ w.a_p.T).mul_(keep))
        put(b, at, (zn @ w.b_g.T).sigmoid_().mul_(zn @ w.b_p.T).mul_(keep))
    x = product(a.to(_F32), b.to(_F32), outgoing).to(X_DTYPE)
    for at in chunks(z, _F32.itemsize):
        _, _, zn = _normalise(z[at], w.norm_in_weight, w.norm_in_bias, eps)
        _, _, xn = _normalise(take(x, at), w.norm_out_weight, w.norm_out_bias, eps)
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
) -> tuple[Tensor, list[Tensor]]:
    """Return (dz bf16, ten weight gradients in their weights' dtypes) from what :func:`forward` saved."""
    w = _operands(weights)
    gradients = TriangleMultiplicationWeights(*(torch.zeros_like(weight) for weight in w))
    dx = channel_major(z, _BF16)
    dgate = torch.empty(z.shape, dtype=_BF16, device=z.device)
    for at in chunks(z, _F32.itemsize):
        _, _, zn = _normalise(z[at], w.norm_in_weight, w.norm_in_bias, eps)
        unit, scale, xn = _normalise(take(x, at), w.norm_out_weight, w.norm_out_bias, eps)
        g, y, do = (zn @ w.gate.T).sigmoid_(), xn @ w.out.T, dout[at].to(_F32)
        dy = _round(do * g)
        dgate[at] = do * y * g * (1 - g)
        gradients.out.add_(rows(dy).T @ rows(xn))
        dxn = dy @ w.out
        gradients.norm_out_weight.add_(rows(dxn * unit).sum(0))
        gradients.norm_out_bias.add_(rows(dxn).sum(0))
        put(dx, at, layer_norm_backward(dxn * w.norm_out_weight, unit, scale))

    da, db = (side.to(_BF16) for side in product_backward(dx.to(_F32), a.to(_F32), b.to(_F32), outgoing))
    dz = torch.empty(z.shape, dtype=_BF16, device=z.device)
    for at in chunks(z, _F32.itemsize):
        unit, scale, zn = _normalise(z[at], w.norm_in_weight, w.norm_in_bias, eps)
        keep = mask_factor(mask, at, _F32)
        pre = {"gate": dgate[at].to(_F32)}
        for side, projection, gate in ((da, "a_p", "a_g"), (db, "b_p", "b_g")):
            value, opening, d = zn @ getattr(w, projection).T, (zn @ getattr(w, gate).T).sigmoid_(), take(side, at).to(_F32) * keep
            pre[projection], pre[gate] = _round(d * opening), _round(d * value * opening * (1 - opening))
        dzn = torch.zeros_like(zn)
        for name, d in pre.items():
            getattr(gradients, name).add_(rows(d).T @ rows(zn))
            dzn += d @ getattr(w, name)
        gradients.norm_in_weight.add_(rows(dzn * unit).sum(0))
        gradients.norm_in_bias.add_(rows(dzn).sum(0))
        dz[at] = layer_norm_backward(dzn * w.norm_in_weight, unit, scale)
    return dz, [gradient.to(weight.dtype) for gradient, weight in zip(gradients, weights, strict=True)]


def _operands(weights: Sequence[Tensor]) -> TriangleMultiplicationWeights:
    """The weights in fp32, the matrices rounded to bf16."""
    return TriangleMultiplicationWeights(*(_round(weight) if weight.dim() == 2 else weight.to(_F32) for weight in weights))


def _normalise(values: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised values, their scale, and the affine result rounded to bf16) of a LayerNorm, all in fp32."""
    unit, scale = layer_norm(values.to(_F32), eps)
    return unit, scale, _round(affine(unit, weight, bias))


def _round(tensor: Tensor) -> Tensor:
    """Round to bf16 and keep it in fp32, where products of two such numbers are exact."""
    return tensor.to(_BF16).to(_F32)
