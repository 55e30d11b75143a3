"""Triangle multiplication: contract, interface, operators, reference and CPU emulation, one module each."""

from turbopair.triangle_multiplication.contract import DIRECTIONS, TriangleMultiplicationWeights
from turbopair.triangle_multiplication.interface import supports_multiplication, triangle_multiplication

__all__ = ["DIRECTIONS", "TriangleMultiplicationWeights", "supports_multiplication", "triangle_multiplication"]
