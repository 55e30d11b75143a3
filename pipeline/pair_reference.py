"""Triangle multiplication and the attention module in FP64 with all their gradients, on any device.

The formulas as PyTorch's autograd differentiates them, from inputs of any dtype. Memory: multiplication holds about 25
arrays of the size of z in FP64 (27 GB at N = 1024, C = 128); in the module the attention itself is chunked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.pair_inputs import EPS, PairInputs
from pipeline.tensors import WEIGHT
from turbopair.triangle_attention.reference import reference as attention


def multiplication(inputs: PairInputs) -> dict[str, Tensor]:
    """``out``, ``dz`` ``[N, N, C]`` and the gradients of the weights, in FP64."""
    z, w = _leaves(inputs)
    with _exact(z):
        zn = F.layer_norm(z, z.shape[-1:], w["norm_in_weight"], w["norm_in_bias"], EPS)
        a, b = (F.linear(zn, w[f"{name}_g"]).sigmoid() * F.linear(zn, w[f"{name}_p"]) for name in "ab")
        if inputs.mask is not None:
            a, b = (operand * inputs.mask[..., None] for operand in (a, b))
        a, b = (operand.permute(2, 0, 1) for operand in (a, b))  # [C, N, N]
        product = a @ b.mT if inputs.case.direction == "outgoing" else a.mT @ b
        x = F.layer_norm(product.permute(1, 2, 0), z.shape[-1:], w["norm_out_weight"], w["norm_out_bias"], EPS)
        out = F.linear(zn, w["gate"]).sigmoid() * F.linear(x, w["out"])
        out.backward(inputs.dout.double())
    return _results(out, z, w)


def attention_module(inputs: PairInputs) -> dict[str, Tensor]:
    """``out``, ``dz`` ``[N, N, C]`` and the gradients of the weights, in FP64: attention along the rows of z."""
    z, w = _leaves(inputs)
    case = inputs.case
    shape = (case.n, case.n, case.heads, case.head_dim)
    with _exact(z):
        zn = F.layer_norm(z, z.shape[-1:], w["norm_weight"], w["norm_bias"], EPS)
        q, k, v = (F.linear(zn, w[name]).view(shape) for name in "qkv")
        bias = F.linear(zn, w["bias"]).permute(2, 0, 1)
        core = (q.detach()[None], k.detach()[None], v.detach()[None], bias.detach()[None])
        mask = None if inputs.mask is None else inputs.mask[None]
        attended = attention(*core, mask=mask)["out"][0].requires_grad_()
        gate = F.linear(zn, w["gate"]).sigmoid()
        out = F.linear(attended.flatten(-2) * gate, w["out"])
        # the graph ends at attended on one side and at zn on the other: q, k, v and bias get theirs from the attention
        out.backward(inputs.dout.double(), retain_graph=True)
        assert attended.grad is not None
        given = attention(*core, mask=mask, dout=attended.grad[None])
        torch.autograd.backward([q, k, v, bias], [given[name][0] for name in ("dq", "dk", "dv", "dbias")])
    return _results(out, z, w)


def _exact(z: Tensor) -> torch.autocast:
    return torch.autocast(z.device.type, enabled=False)


def _leaves(inputs: PairInputs) -> tuple[Tensor, dict[str, Tensor]]:
    weights = {name: weight.double().requires_grad_() for name, weight in inputs.weights.items()}
    return inputs.z.double().requires_grad_(), weights


def _results(out: Tensor, z: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = {"dz": z.grad, **{WEIGHT + name: weight.grad for name, weight in weights.items()}}
    return {"out": out.detach(), **{name: gradient for name, gradient in gradients.items() if gradient is not None}}
