"""Plain PyTorch, as OpenFold3 computes without a kernel, and the same under ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn import functional as F

from pipeline.implementations.base import Bound, Tensor, register
from pipeline.implementations.multiplication.base import MultiplicationPeer, bind_unpacked
from pipeline.pair_inputs import EPS, MultiplicationCase, PairInputs

Formula = Callable[..., Tensor]


def formula(z: Tensor, *weights: Tensor, mask: Tensor, outgoing: bool) -> Tensor:
    """OpenFold3's layer for z in bf16: LayerNorm in fp32, everything between rounded to the dtype of z, weights cast at their use."""
    norm_in, norm_in_bias, a_p, a_g, b_p, b_g, norm_out, norm_out_bias, out, gate = weights

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), EPS).to(z.dtype)

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.to(z.dtype))

    zn = norm(z, norm_in, norm_in_bias)
    a = mask * torch.sigmoid(linear(zn, a_g)) * linear(zn, a_p)
    b = mask * torch.sigmoid(linear(zn, b_g)) * linear(zn, b_p)
    a, b = a.movedim(-1, -3), b.movedim(-1, -3)
    x = a @ b.mT if outgoing else a.mT @ b
    return linear(norm(x.movedim(-3, -1), norm_out, norm_out_bias), out) * torch.sigmoid(linear(zn, gate))


@lru_cache(maxsize=1)
def _compiled() -> Formula:
    # A process meets many shapes; beyond the limit Dynamo would run the uncompiled form, with fullgraph it raises.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(formula, dynamic=False, fullgraph=True)


@register
class Eager(MultiplicationPeer):
    """OpenFold3's formula; every step is an array in memory. A missing mask is one of ones, as there."""

    name = "eager"
    title = "PyTorch eager (OpenFold3 stock)"

    def limits(self, case: MultiplicationCase, device: torch.device) -> str | None:
        """Everything is supported."""
        return None

    def bind(self, inputs: PairInputs) -> Bound:
        """z ``[1, N, N, C]``, mask ``[1, N, N, 1]`` in the dtype of z."""
        return self._bind(inputs, formula)

    def _bind(self, inputs: PairInputs, function: Formula) -> Bound:
        mask = torch.ones_like(inputs.z[..., :1]) if inputs.mask is None else inputs.mask[..., None].to(inputs.z.dtype)
        outgoing = inputs.case.direction == "outgoing"
        return bind_unpacked(inputs, lambda z, *weights: function(z, *weights, mask=mask[None], outgoing=outgoing))


@register
class Compiled(Eager):
    """The same function compiled by PyTorch."""

    name = "compiled"
    title = "PyTorch compiled (torch.compile)"

    def limits(self, case: MultiplicationCase, device: torch.device) -> str | None:
        """Compiled for GPUs."""
        if device.type == "cpu":
            return "torch.compile is compared on GPUs; for a CPU it would call a C++ compiler for a time that says nothing about a GPU"
        return None

    def bind(self, inputs: PairInputs) -> Bound:
        """As :class:`Eager`."""
        return self._bind(inputs, _compiled())
