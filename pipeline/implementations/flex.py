"""FlexAttention under ``torch.compile``; the bias is a captured tensor and gets its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from pipeline.implementations.base import MASK_VALUE, Bound, Implementation, Tensor, bind_batched, fp32_already, register
from pipeline.inputs import Case, Inputs


@lru_cache(maxsize=1)
def compiled() -> Callable[..., Tensor]:
    """The compiled function of q, k, v ``[I, H, N, D]``, bias ``[H, N, N]``, mask bool ``[I, N]`` or None, and the scale."""
    from torch.nn.attention.flex_attention import flex_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        def score(logit: Tensor, slice_: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            logit = logit + bias[head, query, key]
            return logit if mask is None else torch.where(mask[slice_, key], logit, MASK_VALUE)

        return flex_attention(q, k, v, score_mod=score, scale=scale)

    # A process meets many shapes. Beyond the limit Dynamo would run the uncompiled form; with fullgraph it raises.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(attention, dynamic=False, fullgraph=True)


@register
class Flex(Implementation):
    """PyTorch's generated kernel; dBias is accumulated with atomic additions."""

    name = "flex"
    title = "FlexAttention (torch.compile)"

    def limits(self, case: Case, device: torch.device) -> str | None:
        """Training needs a GPU."""
        if device.type == "cpu":
            return f"FlexAttention of PyTorch {torch.__version__} has no backward on CPU"
        return None

    def bind(self, inputs: Inputs) -> Bound:
        """Native layout ``[I, H, N, D]``; the bias keeps its dtype."""
        kernel = compiled()

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return kernel(q[0], k[0], v[0], bias[0, 0], inputs.mask, inputs.scale)[None]

        return bind_batched(inputs, attention, heads_first=True, out_heads_first=True)


@register
class FlexFp32Bias(Flex):
    """With the bias in fp32, which its gradient is then too."""

    name = "flex_fp32bias"
    title = "FlexAttention, fp32 bias"

    def limits(self, case: Case, device: torch.device) -> str | None:
        """As :class:`Flex`; a case whose bias is fp32 already has no variant."""
        return fp32_already(case, "flex") or super().limits(case, device)

    def bind(self, inputs: Inputs) -> Bound:
        """The bias is converted before, outside the timing."""
        return super().bind(replace(inputs, bias=inputs.bias.float()))
