"""MegaFold's fused attention, importable where its repository's ``FusedEvoAttention`` folder is on the Python path.

The module there is ``evoattention`` in its present README, ``evoformer`` in an earlier one; the newer name is taken first.
"""

from __future__ import annotations

import importlib.util

import torch

from pipeline.implementations.base import Bound, Implementation, NotInstalled, Tensor, additive_mask, bind_batched, register
from pipeline.inputs import Case, Inputs


@register
class MegaFold(Implementation):
    """A Triton kernel without a package: no version is known."""

    name = "megafold"
    title = "MegaFold"
    distribution = "MegaFold (FusedEvoAttention)"
    needs_gpu = True

    def version(self) -> str:
        """No version exists. Raises :class:`NotInstalled` when the module is not found."""
        if not _importable("evoattention") and not _importable("evoformer"):
            raise NotInstalled(
                "MegaFold has no installable package: put the folder FusedEvoAttention of "
                "github.com/Supercomputing-System-AI-Lab/MegaFold (its module evoattention or evoformer) on PYTHONPATH"
            )
        return "unversioned"

    def limits(self, case: Case, device: torch.device) -> str | None:
        """Nothing is documented; an error of the kernel becomes a failed record."""
        return None

    def bind(self, inputs: Inputs) -> Bound:
        """q, k, v ``[1, I, N, H, D]``, additive mask ``[1, I, 1, 1, N]`` (required), bias ``[1, 1, H, N, N]``."""
        module = self.module("evoattention") if _importable("evoattention") else self.module("evoformer")
        kernel = module.TritonEvoformer
        mask = additive_mask(inputs, inputs.q.dtype)
        if mask is None:
            mask = inputs.q.new_zeros(1, inputs.q.shape[0], 1, 1, inputs.q.shape[1])

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return kernel(q, k, v, mask, bias).to(q.dtype)

        return bind_batched(inputs, attention, heads_first=False, out_heads_first=False)


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
