"""What the implementations of triangle multiplication share: the two forms in which they take the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeline.implementations.base import Bound, Implementation, Tensor
from pipeline.pair_inputs import PairInputs
from pipeline.tensors import MULTIPLICATION, MULTIPLICATION_WEIGHTS, WEIGHT

#: packed weights, in the names of cuEquivariance, which others took over: each projection of a above that of b
PACKED = (
    "norm_in_weight", "norm_in_bias", "p_in_weight", "g_in_weight", "norm_out_weight", "norm_out_bias", "p_out_weight", "g_out_weight",
)  # fmt: skip


class MultiplicationPeer(Implementation):
    """One way to compute triangle multiplication."""

    operator = MULTIPLICATION


def bind_unpacked(inputs: PairInputs, call: Callable[..., Tensor]) -> Bound:
    """A :class:`Bound` for a peer that takes ``call(z, *weights)``: z ``[1, N, N, C]``, the ten weights in their order."""

    def restore(native: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor[0] if name in ("out", "dz") else tensor for name, tensor in native.items()}

    weights = {WEIGHT + name: inputs.weights[name] for name in MULTIPLICATION_WEIGHTS}
    return Bound(call=call, inputs={"dz": inputs.z[None], **weights}, dout=inputs.dout[None], restore=restore)


def bind_packed(inputs: PairInputs, call: Callable[..., Tensor], *, residual: bool = False, autocast: bool = False) -> Bound:
    """A :class:`Bound` for a peer that takes ``call(z, **weights)`` with :data:`PACKED` weights.

    With ``residual`` its output is z plus the update; the update is compared, so z and its share of dz are taken off again
    outside the timing. With ``autocast`` both ways run under bf16 autocast.
    """
    w = inputs.weights
    packed = {
        "norm_in_weight": w["norm_in_weight"], "norm_in_bias": w["norm_in_bias"],
        "p_in_weight": torch.cat([w["a_p"], w["b_p"]]), "g_in_weight": torch.cat([w["a_g"], w["b_g"]]),
        "norm_out_weight": w["norm_out_weight"], "norm_out_bias": w["norm_out_bias"], "p_out_weight": w["out"], "g_out_weight": w["gate"],
    }  # fmt: skip

    def restore(native: dict[str, Tensor]) -> dict[str, Tensor]:
        out, dz = native["out"][0], native["dz"][0]
        if residual:
            out, dz = out.float() - inputs.z.float(), dz.float() - inputs.dout.float()
        a_p, b_p = native["p_in_weight"].chunk(2)
        a_g, b_g = native["g_in_weight"].chunk(2)
        split = {"a_p": a_p, "b_p": b_p, "a_g": a_g, "b_g": b_g, "out": native["p_out_weight"], "gate": native["g_out_weight"]}
        return {
            "out": out, "dz": dz,
            **{WEIGHT + name: split[name] if name in split else native[name] for name in MULTIPLICATION_WEIGHTS},
        }  # fmt: skip

    def named(z: Tensor, *weights: Tensor) -> Tensor:
        return call(z, **dict(zip(PACKED, weights, strict=True)))

    return Bound(call=named, inputs={"dz": inputs.z[None], **packed}, dout=inputs.dout[None], restore=restore, autocast=autocast)
