"""The class that `turbopair.openfold3.install` gives to OpenFold3's triangle attentions.

Importing this module imports openfold3; unpickling a model with turbopair installed does so too. Written for openfold3 0.5.0, of
whose attention it uses the parts before and after the core: the layer norm, the projections, the gate.
"""

import torch
from openfold3.core.model.layers.triangular_attention import TriangleAttention
from torch import Tensor

from turbopair.openfold3 import Site
from turbopair.triangle_attention import supports, triangle_attention


class TurbopairTriangleAttention(TriangleAttention):
    """OpenFold3's `TriangleAttention`, with the same parameters, whose attention core is `turbopair.triangle_attention`.

    Instances are made by changing the class of a `TriangleAttention`, never by calling this class.
    """

    _turbopair: Site

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        transpose_bias: bool = False,
        chunk_size: int | None = None,
        *settings: bool,
        **named_settings: bool,
    ) -> Tensor:
        """The update of the pair representation x ``[*, I, J, C]`` in the dtype that the output projection gives.

        Args:
            mask: broadcasts to ``[*, I, J]``; 1 = keep.
            transpose_bias: x is the transposed pair representation (the ending node), the bias is that of the original.
            chunk_size: rows worked on at a time where no gradient is recorded, which bounds memory; None is all at once.
            settings, named_settings: of other backends, and whether to work in place; they count only where turbopair cannot serve.
        """
        site = self._turbopair
        if self._refusal(x, mask) is not None:
            site.stock_calls += 1
            return super().forward(x, mask, transpose_bias, chunk_size, *settings, **named_settings)
        site.calls += 1
        if not self.starting:
            x, mask = x.transpose(-2, -3), None if mask is None else mask.transpose(-1, -2)
        x = self.layer_norm(x)
        bias = self._bias(x, transpose_bias)
        mask = None if mask is None else self._mask_term(x, mask)
        if chunk_size is None or torch.is_grad_enabled():
            out = self._attend(x, bias, mask)
        else:
            out = self._attend_by_rows(x, bias, mask, chunk_size)
        return out if self.starting else out.transpose(-2, -3)

    def _bias(self, x: Tensor, transpose: bool) -> Tensor:
        """The bias ``[*, 1, H, I, J]`` as a view of what the linear wrote, heads fastest."""
        bias = self.linear_z(x).movedim(-1, -3).unsqueeze(-4)
        return bias.transpose(-1, -2) if transpose else bias

    def _mask_term(self, x: Tensor, mask: Tensor) -> Tensor:
        """OpenFold3's additive mask, 0 or -inf (a large finite number), as ``[*, I, 1, 1, J]``."""
        return (self.inf * (mask - 1)).expand(x.shape[:-1])[..., None, None, :]

    def _attend(self, x: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        # The projections come heads first; turbopair takes them as the linears wrote them, [*, I, J, H, D].
        q, k, v = (projection.transpose(-2, -3) for projection in self.mha._prep_qkv(x, x, apply_scale=False))
        out = triangle_attention(q, k, v, bias, mask, precision=self._turbopair.settings.precision)
        return self.mha._wrap_up(out, x)

    def _attend_by_rows(self, x: Tensor, bias: Tensor, mask: Tensor | None, rows: int) -> Tensor:
        """As `_attend`, `rows` rows at a time. Rows attend to themselves only: the result takes the place of x, which is used up."""
        out = x
        for start in range(0, x.shape[-3], rows):
            part = slice(start, start + rows)
            chunk = self._attend(x[..., part, :, :], bias, None if mask is None else mask[..., part, :, :, :])
            if chunk.dtype != out.dtype:  # x in fp32 under autocast
                out = torch.empty_like(x, dtype=chunk.dtype)
            out[..., part, :, :] = chunk
        return out

    def _refusal(self, x: Tensor, mask: Tensor | None) -> str | None:
        """Why turbopair does not compute this call, or None; the first call under new conditions asks."""
        site, device = self._turbopair, x.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        conditions = (x.device, x.dtype, None if mask is None else mask.dtype, autocast)
        if conditions not in site.answers:
            site.answers[conditions] = self._ask(x, mask)
        reason = site.answers[conditions]
        if reason is not None:
            site.settings.refuse([site.name], reason)
        return reason

    def _ask(self, x: Tensor, mask: Tensor | None) -> str | None:
        """turbopair's answer to a call of one token in the dtypes that the projections give."""
        device = x.device.type
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        # Without gradients: checkpointing counts what a forward saves, and the recomputation does not ask again. Then also without
        # autocast's cache, which must not keep weights cast without gradients for the real projections.
        with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            x = self.layer_norm(x[..., :1, :1, :])
            bias = self._bias(x, transpose=False)
            q, k, v = (projection.transpose(-2, -3) for projection in self.mha._prep_qkv(x, x, apply_scale=False))
            term = None if mask is None else self._mask_term(x, mask[..., :1, :1])
        return supports(q, k, v, bias, term, precision=self._turbopair.settings.precision)
