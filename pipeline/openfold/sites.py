"""Recording of what OpenFold3's own triangle attentions are given, and of the gradient that comes back to them.

The class of the attention inside each `TriangleAttention` is swapped for a subclass which computes the same and keeps
q, k, v before scaling, both biases, and, through a hook, the gradient at the attention core's output. Parameters and
their names stay as they are.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Recorded:
    """One call of one site, detached, with leading dimensions of size 1 removed.

    q, k, v, out, dout [I, N, H, D] and bias [H, N, N] in the dtype of the site (bf16 under autocast); mask [I, N] bool, True = attend.
    `dout` is None until the backward pass has gone through the site.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor
    mask: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor | None = None


@contextmanager
def recording(model: torch.nn.Module, wanted: dict[str, str]) -> Iterator[dict[str, Recorded]]:
    """Record the sites `wanted` (name in the result -> module path of a `TriangleAttention`) while the block runs.

    Only calls which will get a gradient are kept, of these the first. Raises KeyError for a path that the model lacks.
    """
    from openfold3.core.model.primitives import Attention

    class RecordingAttention(Attention):
        def forward(self, q_x: torch.Tensor, kv_x: torch.Tensor, biases: Any = None, **flags: Any) -> torch.Tensor:
            self._biases = biases
            return super().forward(q_x, kv_x, biases=biases, **flags)

        def _prep_qkv(self, q_x: torch.Tensor, kv_x: torch.Tensor, apply_scale: bool = True) -> Any:
            q, k, v = super()._prep_qkv(q_x, kv_x, apply_scale=False)
            self._qkv = q, k, v
            return (q / math.sqrt(self.c_hidden) if apply_scale else q), k, v

        def _wrap_up(self, o: torch.Tensor, q_x: torch.Tensor) -> torch.Tensor:
            if o.requires_grad and self._site not in records:
                record = records[self._site] = _recorded(self._qkv, self._biases, o)
                o.register_hook(lambda gradient: setattr(record, "dout", _drop_leading(gradient, 4)))
            del self._qkv, self._biases
            return super()._wrap_up(o, q_x)

    records: dict[str, Recorded] = {}
    modules = dict(model.named_modules())
    attentions: list[Any] = [modules[f"{path}.mha"] for path in wanted.values()]
    classes = [type(attention) for attention in attentions]
    for name, attention in zip(wanted, attentions, strict=True):
        attention.__class__ = RecordingAttention
        attention._site = name
    try:
        yield records
    finally:
        for attention, original in zip(attentions, classes, strict=True):
            attention.__class__ = original
            del attention._site


def _recorded(qkv: tuple[torch.Tensor, ...], biases: list[torch.Tensor], out: torch.Tensor) -> Recorded:
    mask_bias, triangle_bias = biases
    q, k, v = (_drop_leading(t.transpose(-2, -3), 4) for t in qkv)
    mask = _drop_leading(mask_bias, 4)[:, 0, 0, :] > -1.0  # OpenFold3 adds 0 or -1e9
    return Recorded(q, k, v, _drop_leading(triangle_bias, 4)[0], mask, _drop_leading(out, 4))


def _drop_leading(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """The last `dims` dimensions of a tensor whose other dimensions are 1, as contiguous copy.

    A template site may hold several templates: the first is taken.
    """
    while tensor.dim() > dims:
        tensor = tensor[0]
    return tensor.detach().clone(memory_format=torch.contiguous_format)
