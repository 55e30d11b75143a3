"""DeepSpeed's ``DS4Sci_EvoformerAttention`` (CUTLASS kernels, compiled at the first call)."""

from __future__ import annotations

import torch

from pipeline.implementations.base import Bound, Implementation, Tensor, additive_mask, bind_batched, register
from pipeline.inputs import Case, Inputs


@register
class DeepSpeed(Implementation):
    """bf16 only, bias included; more than 16 tokens; head dimension up to 64 in the backward pass."""

    name = "deepspeed"
    title = "DeepSpeed DS4Sci"
    distribution = "deepspeed"
    needs_gpu = True

    def limits(self, case: Case, device: torch.device) -> str | None:
        """The documented range, then whether the operator can be built on this machine."""
        if case.n <= 16:
            return f"DS4Sci_EvoformerAttention needs more than 16 tokens; N is {case.n}"
        if case.head_dim > 64:
            return f"DS4Sci_EvoformerAttention has no backward above head dimension 64; D is {case.head_dim}"
        if case.dtype != "bf16" or case.bias_dtype != "bf16":
            return f"DS4Sci_EvoformerAttention takes bf16 only; q is {case.dtype} and the bias {case.bias_dtype}"
        builder = self.module("deepspeed.ops.op_builder").EvoformerAttnBuilder()
        if not builder.is_compatible(verbose=False):
            return "DeepSpeed cannot build its Evoformer operator here (it needs nvcc and CUTLASS_PATH)"
        return None

    def bind(self, inputs: Inputs) -> Bound:
        """q, k, v ``[1, I, N, H, D]``; biases: mask ``[1, I, 1, 1, N]`` or None, and ``[1, 1, H, N, N]``."""
        evoformer = self.module("deepspeed.ops.deepspeed4science").DS4Sci_EvoformerAttention
        mask = additive_mask(inputs, inputs.q.dtype)

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return evoformer(q, k, v, [mask, bias])

        return bind_batched(inputs, attention, heads_first=False, out_heads_first=False)
