"""Triangle attention: contract, interface, operators, reference and CPU emulation, one module each."""

from turbopair.triangle_attention.contract import DEFAULT_PRECISION, PRECISIONS, Precision
from turbopair.triangle_attention.interface import supports, triangle_attention

__all__ = ["DEFAULT_PRECISION", "PRECISIONS", "Precision", "supports", "triangle_attention"]
