"""miniworld-engine's whole operator, ``miniworld_engine.ops.triangle_attention`` (PyPI ``miniworld-engine``)."""

from __future__ import annotations

import torch

from pipeline.implementations.base import Bound, Tensor, register
from pipeline.implementations.module.base import ModulePeer, bind_module
from pipeline.pair_inputs import EPS, ModuleCase, PairInputs

_ARGUMENTS = {
    "norm_weight": "ln_pair_weight", "norm_bias": "ln_pair_bias", "q": "to_query_weight", "k": "to_key_weight", "v": "to_value_weight",
    "bias": "to_bias_weight", "gate": "to_gate_weight", "out": "to_out_weight",
}  # fmt: skip


@register
class MiniWorldEngine(ModulePeer):
    """A function of z and the weights, under the same autocast; not OpenFold3's class."""

    name = "miniworld_engine"
    title = "miniworld-engine"
    distribution = "miniworld-engine"
    needs_gpu = True

    def limits(self, case: ModuleCase, device: torch.device) -> str | None:
        """Its mask is one of tokens: keys are excluded, the rows of padding are not."""
        if case.has_mask:
            return "miniworld-engine's mask excludes padded keys but not the rows of padding, whose output differs"
        return None

    def bind(self, inputs: PairInputs) -> Bound:
        """z ``[1, N, N, C]``, weights as fp32 parameters."""
        attention = self.module("miniworld_engine.ops").triangle_attention
        parameters = {name: weight.detach().clone().requires_grad_() for name, weight in inputs.weights.items()}
        arguments = {_ARGUMENTS[name]: parameter for name, parameter in parameters.items()}

        def call(z: Tensor) -> Tensor:
            return attention(z, None, n_head=inputs.case.heads, eps=EPS, **arguments)

        return bind_module(inputs, call, parameters)
