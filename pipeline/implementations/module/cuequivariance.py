"""OpenFold3's attention module with its setting for cuEquivariance's attention."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.implementations import cuequivariance
from pipeline.implementations.base import register
from pipeline.implementations.module.base import OpenFold3Peer
from pipeline.pair_inputs import ModuleCase


@register
class CuEquivariance(OpenFold3Peer):
    """OpenFold3 itself takes its PyTorch path where cuEquivariance would fall back to one."""

    name = "cuequivariance"
    title = "cuEquivariance in OpenFold3's module"
    distribution = "cuequivariance-torch"
    core = "cuequivariance-torch"
    needs_gpu = True

    def limits(self, case: ModuleCase, device: torch.device) -> str | None:
        """The documented range of the kernels, in bf16."""
        return cuequivariance.CuEquivariance().falls_back(case.n, case.head_dim, "bf16")

    def prepare(self, module: Any) -> dict[str, Any]:
        """The setting."""
        return {"use_cueq_triangle_kernels": True}
