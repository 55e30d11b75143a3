"""PyTorch's FlexAttention in OpenFold3's triangle attentions, by the same change of class as turbopair's, for the comparison of steps.

The core is compiled once a kind of site (head dimension, dtype, with and without gradients); the pair bias is a tensor that the score
function captures, and gets its gradient by atomic additions. Multiplications stay OpenFold3's own.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from turbopair.openfold3 import ATTENTION, Row

_MASKED = -1e9


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    """Attention of ``[B, I, H, N, D]`` with a bias ``[B, H, N, N]`` and ``keep [B, I, N]`` (True = attend); returns ``[B, I, H, N, D]``.

    The templates are the only sites with B > 1; there is one call each.
    """
    masks = [None] * len(q) if keep is None else keep.unbind()
    with torch.autocast(q.device.type, enabled=False):
        return torch.stack([_core()(*one, scale) for one in zip(q, k, v, bias, masks, strict=True)])


@lru_cache(maxsize=1)
def _core() -> Callable[..., Tensor]:
    # A process meets more kinds of site than the limit; beyond it Dynamo would run the uncompiled form. With fullgraph it raises.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(_flex, dynamic=False, fullgraph=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def score(logit: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        logit = logit + bias[head, query, key]
        return logit if keep is None else torch.where(keep[row, key], logit, _MASKED)

    return flex_attention(q, k, v, score_mod=score, scale=scale)


class Flexed:
    """The model's attentions that compute through FlexAttention: what they did, and the way back."""

    def __init__(self, sites: dict[str, Any]) -> None:
        self._sites = sites

    def report(self) -> list[Row]:
        """A row an attention."""
        return [Row(name, ATTENTION, "flex", None, site._flex_calls, 0) for name, site in self._sites.items()]

    def remove(self) -> None:
        """Give every attention its class back."""
        attention = _classes()[0]
        for site in self._sites.values():
            site.__class__ = attention
            del site._flex_calls


def plug(model: nn.Module) -> Flexed:
    """Have FlexAttention compute every triangle attention of `model`."""
    attention, flexed = _classes()
    sites: dict[str, Any] = {name: m for name, m in model.named_modules() if type(m) is attention}
    for site in sites.values():
        site.__class__ = flexed
        site._flex_calls = 0
    return Flexed(sites)


@lru_cache(maxsize=1)
def _classes() -> tuple[type, type]:
    """OpenFold3's `TriangleAttention` and the class that replaces it."""
    from openfold3.core.model.layers.triangular_attention import TriangleAttention

    class FlexTriangleAttention(TriangleAttention):
        """Parts before and after the core are OpenFold3's; other backends' settings and chunks do not count."""

        def forward(
            self, x: Tensor, mask: Tensor | None = None, transpose_bias: bool = False, *settings: Any, **named_settings: Any
        ) -> Tensor:
            self._flex_calls += 1
            if not self.starting:
                x, mask = x.transpose(-2, -3), None if mask is None else mask.transpose(-1, -2)
            x = self.layer_norm(x)
            bias = self.linear_z(x).movedim(-1, -3)
            bias = bias.mT if transpose_bias else bias
            keep = None if mask is None else (mask != 0).expand(x.shape[:-1])
            q, k, v = (one.flatten(0, -5) for one in self.mha._prep_qkv(x, x, apply_scale=False))
            # contiguous: one compiled form for starting and ending nodes
            bias, keep = bias.flatten(0, -4).contiguous(), None if keep is None else keep.flatten(0, -3).contiguous()
            out = attend(q, k, v, bias, keep, self.c_hidden**-0.5).unflatten(0, x.shape[:-3])
            out = self.mha._wrap_up(out.transpose(-2, -3), x)
            return out if self.starting else out.transpose(-2, -3)

    return TriangleAttention, FlexTriangleAttention
