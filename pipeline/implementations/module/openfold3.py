"""OpenFold3's attention module as it is."""

from __future__ import annotations

import torch

from pipeline.implementations.base import register
from pipeline.implementations.module.base import OpenFold3Peer
from pipeline.pair_inputs import ModuleCase


@register
class Stock(OpenFold3Peer):
    """Its PyTorch attention, with all logits in memory."""

    name = "openfold3"
    title = "OpenFold3 stock (PyTorch)"
    distribution = "openfold3"

    def limits(self, case: ModuleCase, device: torch.device) -> str | None:
        """Everything is supported."""
        return None
