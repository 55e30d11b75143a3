"""OpenFold3's attention module with FlexAttention as its core."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.implementations.base import register
from pipeline.implementations.module.base import OpenFold3Peer
from pipeline.openfold import flex
from pipeline.pair_inputs import ModuleCase


@register
class Flex(OpenFold3Peer):
    """As plugged in for the comparison of training steps (:mod:`pipeline.openfold.flex`)."""

    name = "flex"
    title = "FlexAttention in OpenFold3's module"
    distribution = "openfold3"

    def limits(self, case: ModuleCase, device: torch.device) -> str | None:
        """Training needs a GPU."""
        if device.type == "cpu":
            return f"FlexAttention of PyTorch {torch.__version__} has no backward on CPU"
        return None

    def prepare(self, module: Any) -> dict[str, Any]:
        """Plug it in."""
        flex.plug(module)
        return {}
