"""The classes that `turbopair.openfold3.install` gives to OpenFold3's triangle attentions and multiplications.

Importing this module imports openfold3; unpickling a model with turbopair installed does so too. Written for openfold3 0.5.0. Of an
attention it uses OpenFold3's parts before and after the core (layer norm, projections, gate); of a multiplication the parameters only.
"""

from typing import Any

import torch
from openfold3.core.model.layers.triangular_attention import TriangleAttention
from openfold3.core.model.layers.triangular_multiplicative_update import (
    BaseTriangleMultiplicativeUpdate,
    TriangleMultiplicationIncoming,
    TriangleMultiplicationOutgoing,
    TriangleMultiplicativeUpdate,
)
from torch import Tensor, nn

from turbopair.openfold3 import ATTENTION, MULTIPLICATION, Site
from turbopair.triangle_attention import supports, triangle_attention
from turbopair.triangle_attention.contract import problem
from turbopair.triangle_multiplication import TriangleMultiplicationWeights, supports_multiplication, triangle_multiplication
from turbopair.triangle_multiplication.contract import problem as multiplication_problem

WANTED = {ATTENTION: "TriangleAttention", MULTIPLICATION: "TriangleMultiplicativeUpdate"}


def operator_of(module: nn.Module) -> str | None:
    """Which triangle operation a module of OpenFold3 is, or None."""
    if isinstance(module, TriangleAttention):
        return ATTENTION
    return MULTIPLICATION if isinstance(module, BaseTriangleMultiplicativeUpdate) else None


def never(module: Any, precision: str | None) -> str | None:
    """Why no call of this triangle operation can be served, or None. Raises ValueError for an unknown precision."""
    name = type(module).__name__
    if isinstance(module, TriangleAttention):
        if type(module) is not TriangleAttention:
            return f"its class {name} is derived from TriangleAttention and may compute something else"
        token = torch.empty((1, 1, 1, module.no_heads, module.c_hidden), dtype=torch.bfloat16, device="meta")
        refusal = problem(token, token, token, token.new_empty((1, 1, module.no_heads, 1, 1)), precision=precision)
        if refusal is None or isinstance(refusal, NotImplementedError):
            return None if refusal is None else str(refusal)
        raise refusal
    if type(module) not in SERVED:
        known = "TriangleMultiplicationOutgoing, TriangleMultiplicationIncoming"
        return f"its class {name} is none of {known} and may compute something else"
    biased = [name for name, linear in module.named_children() if isinstance(linear, nn.Linear) and linear.bias is not None]
    if biased:
        return f"its {biased[0]} has a bias, which the operator does not add"
    if module.layer_norm_in.eps != module.layer_norm_out.eps:
        return f"its layer norms have two eps, {module.layer_norm_in.eps} and {module.layer_norm_out.eps}; the operator takes one"
    token = torch.empty((1, 1, 1, module.c_z), dtype=torch.bfloat16, device="meta")
    parameters = TriangleMultiplicationWeights(*(torch.empty_like(weight, device="meta") for weight in weights(module)))
    refusal = multiplication_problem(token, None, parameters, "outgoing", module.layer_norm_in.eps)
    return None if refusal is None else str(refusal)


class Served:
    """What both kinds of site share: the decision whether turbopair computes a call."""

    _turbopair: Site

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
        """turbopair's answer to a call of one token in the dtypes that this call has."""
        raise NotImplementedError


class TurbopairTriangleAttention(Served, TriangleAttention):
    """OpenFold3's `TriangleAttention`, with the same parameters, whose attention core is `turbopair.triangle_attention`.

    Instances are made by changing the class of a `TriangleAttention`, never by calling this class.
    """

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
            site.count(served=False)
            return super().forward(x, mask, transpose_bias, chunk_size, *settings, **named_settings)
        site.count(served=True)
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


class TurbopairTriangleMultiplication(Served, TriangleMultiplicativeUpdate):
    """OpenFold3's triangle multiplication, with the same parameters, computed as a whole by `turbopair.triangle_multiplication`.

    Instances are made by changing the class of an outgoing or incoming multiplication, never by calling this class.
    """

    def forward(
        self,
        z: Tensor,
        mask: Tensor | None = None,
        inplace_safe: bool = False,
        use_cueq_triangle_kernels: bool = False,
        use_triton_triangle_kernels: bool = False,
        _add_with_inplace: bool = False,
        _inplace_chunk_size: int | None = 256,
    ) -> Tensor:
        """The update of the pair representation z ``[*, N, N, C]``, in the dtype that OpenFold3's own layer gives.

        Args:
            mask: broadcasts to ``[*, N, N]``; 1 = keep.
            inplace_safe: at inference: write into z, and return z. OpenFold3 takes it back where cuEquivariance is asked for.
            _add_with_inplace: in place, z becomes z + update rather than the update.
            use_cueq_triangle_kernels, use_triton_triangle_kernels, _inplace_chunk_size: count only where turbopair cannot serve,
                except that the first forbids working in place.
        """
        site = self._turbopair
        if self._refusal(z, mask) is not None:
            site.count(served=False)
            return super().forward(
                z, mask, inplace_safe, use_cueq_triangle_kernels, use_triton_triangle_kernels, _add_with_inplace, _inplace_chunk_size
            )
        site.count(served=True)
        update = triangle_multiplication(*_arguments(self, z, mask))
        if not inplace_safe or use_cueq_triangle_kernels:
            return update
        return z.add_(update) if _add_with_inplace else z.copy_(update)

    def _ask(self, x: Tensor, mask: Tensor | None) -> str | None:
        with torch.no_grad():
            return supports_multiplication(*_arguments(self, x[..., :1, :1, :], None if mask is None else mask[..., :1, :1]))


class TurbopairTriangleMultiplicationOutgoing(TurbopairTriangleMultiplication, TriangleMultiplicationOutgoing):
    """The class of a served `TriangleMultiplicationOutgoing`, so that it stays one."""


class TurbopairTriangleMultiplicationIncoming(TurbopairTriangleMultiplication, TriangleMultiplicationIncoming):
    """The class of a served `TriangleMultiplicationIncoming`, so that it stays one."""


SERVED: dict[type, type] = {
    TriangleAttention: TurbopairTriangleAttention,
    TriangleMultiplicationOutgoing: TurbopairTriangleMultiplicationOutgoing,
    TriangleMultiplicationIncoming: TurbopairTriangleMultiplicationIncoming,
}
"""OpenFold3's class of a site, and the class that serves it."""


def weights(module: Any) -> TriangleMultiplicationWeights:
    """The parameters of a triangle multiplication, as they are: the operator casts what it has to."""
    return TriangleMultiplicationWeights(
        norm_in_weight=module.layer_norm_in.weight,
        norm_in_bias=module.layer_norm_in.bias,
        a_p=module.linear_a_p.weight,
        a_g=module.linear_a_g.weight,
        b_p=module.linear_b_p.weight,
        b_g=module.linear_b_g.weight,
        norm_out_weight=module.layer_norm_out.weight,
        norm_out_bias=module.layer_norm_out.bias,
        out=module.linear_z.weight,
        gate=module.linear_g.weight,
    )


def _working_dtype(z: Tensor) -> torch.dtype:
    """The dtype in which OpenFold3's own layer computes its products: a bf16 z stays bf16, another becomes what autocast says."""
    device = z.device.type
    if z.dtype == torch.bfloat16 or not torch.is_autocast_enabled(device):
        return z.dtype
    return torch.get_autocast_dtype(device)


def _arguments(module: Any, z: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, TriangleMultiplicationWeights, str, float]:
    """What the operator is called with: z, mask, weights, direction, eps."""
    mask = None if mask is None else mask.expand(z.shape[:-1])
    direction = "outgoing" if module._outgoing else "incoming"
    return z.to(_working_dtype(z)), mask, weights(module), direction, module.layer_norm_in.eps
