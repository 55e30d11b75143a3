"""The Triton kernel of OpenFold3, from the installed package."""

from __future__ import annotations

import torch

from pipeline.implementations.base import Bound, Implementation, NotInstalled, Tensor, additive_mask, bind_batched, register
from pipeline.inputs import Case, Inputs


@register
class OpenFold3Triton(Implementation):
    """Called as OpenFold3's attention module calls it; dBias is summed in fp32 and returned in the dtype of dout."""

    name = "openfold3_triton"
    title = "OpenFold3 Triton"
    distribution = "openfold3"
    needs_gpu = True

    def limits(self, case: Case, device: torch.device) -> str | None:
        """OpenFold3 itself takes the PyTorch path up to 16 tokens."""
        if case.n <= 16:
            return f"OpenFold3 uses its Triton kernel above 16 tokens; N is {case.n}"
        return None

    def bind(self, inputs: Inputs) -> Bound:
        """q, k, v ``[1, I, N, H, D]``, mask ``[1, I, 1, 1, N]`` additive (required), bias ``[1, 1, H, N, N]``."""
        kernel = getattr(self.module("openfold3.core.kernels.triton.evoformer"), "TritonEvoformer", None)
        if kernel is None:
            raise NotInstalled(f"openfold3 {self.version()} has no Triton kernel here (is triton installed?)")
        mask = additive_mask(inputs, inputs.q.dtype)
        if mask is None:
            mask = inputs.q.new_zeros(1, inputs.q.shape[0], 1, 1, inputs.q.shape[1])

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return kernel(q, k, v, mask, bias, True)

        return bind_batched(inputs, attention, heads_first=False, out_heads_first=False)
