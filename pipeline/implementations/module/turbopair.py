"""OpenFold3's attention module with this repository's kernels installed, as users install them."""

from __future__ import annotations

from typing import Any

import torch

import turbopair
from pipeline.implementations.base import Unsupported, register
from pipeline.implementations.module.base import OpenFold3Peer
from pipeline.pair_inputs import ModuleCase


@register
class TurboPair(OpenFold3Peer):
    """``turbopair.openfold3.install`` with the default precision; on a CPU the emulation of the kernels runs."""

    name = "turbopair"
    title = "turbopair in OpenFold3's module"
    distribution = "openfold3"

    def version(self) -> str:
        """The version of the package in use. Raises :class:`NotInstalled` without openfold3."""
        super().version()
        return turbopair.__version__

    def limits(self, case: ModuleCase, device: torch.device) -> str | None:
        """What the installation refuses is found when it is made."""
        return None

    def prepare(self, module: Any) -> dict[str, Any]:
        """Install, so that a site which cannot be served raises instead of running OpenFold3's own attention."""
        from turbopair.openfold3 import NotServed, install

        try:
            install(module, strict=True)
        except NotServed as reason:
            raise Unsupported(str(reason)) from reason
        return {}
