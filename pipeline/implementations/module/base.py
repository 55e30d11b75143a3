"""OpenFold3's own ``TriangleAttention``, with the weights of a case, under its autocast conventions."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any

import torch

from pipeline.implementations.base import Bound, Implementation, NotInstalled, Tensor
from pipeline.pair_inputs import PairInputs
from pipeline.tensors import MODULE, MODULE_WEIGHTS, WEIGHT

#: the parameters of OpenFold3's module, by the names of :mod:`pipeline.tensors`
PARAMETERS = {
    "norm_weight": "layer_norm.weight", "norm_bias": "layer_norm.bias", "q": "mha.linear_q.weight", "k": "mha.linear_k.weight",
    "v": "mha.linear_v.weight", "bias": "linear_z.weight", "gate": "mha.linear_g.weight", "out": "mha.linear_o.weight",
}  # fmt: skip


class ModulePeer(Implementation):
    """One way to compute the attention module: LayerNorm, projections of q, k, v, bias and gate, attention, gate, output projection."""

    operator = MODULE


class OpenFold3Peer(ModulePeer):
    """OpenFold3's module with another core; ``core`` is the package of the core when that is not OpenFold3's."""

    core: str | None = None

    def version(self) -> str:
        """The version of the core. Raises :class:`NotInstalled` when openfold3 or the core is missing."""
        for package in filter(None, ("openfold3", self.core)):
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                raise NotInstalled(f"{package} is not installed (pip install {package}): the module is OpenFold3's own class") from None
        return version

    def prepare(self, module: Any) -> dict[str, Any]:
        """Plug the core into OpenFold3's module; returns the settings with which it is called."""
        return {}

    def bind(self, inputs: PairInputs) -> Bound:
        """z ``[1, N, N, C]`` and mask ``[1, N, N]`` in the dtype of z, as the pair stack passes them (ones without a mask)."""
        case = inputs.case
        layer = self.module("openfold3.core.model.layers.triangular_attention").TriangleAttention
        module = layer(case.channels, case.head_dim, case.heads).to(inputs.z.device)
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, weight in inputs.weights.items():
                parameters.pop(PARAMETERS[name]).copy_(weight)
        if parameters:
            raise RuntimeError(f"OpenFold3's TriangleAttention has parameters that the case has no weights for: {', '.join(parameters)}")
        settings = self.prepare(module)
        mask = torch.ones_like(inputs.z[..., 0]) if inputs.mask is None else inputs.mask.to(inputs.z.dtype)
        parameters = dict(module.named_parameters())
        return bind_module(
            inputs, lambda z: module(z, mask[None], **settings), {name: parameters[PARAMETERS[name]] for name in MODULE_WEIGHTS}
        )


def bind_module(inputs: PairInputs, call: Callable[[Tensor], Tensor], parameters: dict[str, Tensor]) -> Bound:
    """A :class:`Bound` of ``call(z)`` and of the parameters that it uses, under bf16 autocast."""

    def quietly(z: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # on a CPU: OpenFold3 asks for CUDA's autocast inside, whatever the device
            warnings.filterwarnings("ignore", message=".*autocast.*", category=UserWarning)
            return call(z)

    def restore(native: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor[0] if name in ("out", "dz") else tensor for name, tensor in native.items()}

    return Bound(
        call=quietly, inputs={"dz": inputs.z[None]}, dout=inputs.dout[None], restore=restore, autocast=True,
        parameters={WEIGHT + name: parameter for name, parameter in parameters.items()},
    )  # fmt: skip
