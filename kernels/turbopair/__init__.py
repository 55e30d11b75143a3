"""turbopair: fast, exact, reproducible pair-stack kernels for AlphaFold3-class training.

The public doors are :func:`triangle_attention` and :func:`triangle_multiplication`; :func:`supports` and
:func:`supports_multiplication` tell beforehand whether a call would be accepted. Importing the package needs neither a GPU nor a CUDA
compiler nor the built kernel library.
"""

from turbopair.native import NativeUnavailable, kernel_digest
from turbopair.triangle_attention import DEFAULT_PRECISION, PRECISIONS, supports, triangle_attention
from turbopair.triangle_multiplication import TriangleMultiplicationWeights, supports_multiplication, triangle_multiplication

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_PRECISION",
    "PRECISIONS",
    "NativeUnavailable",
    "TriangleMultiplicationWeights",
    "__version__",
    "kernel_digest",
    "supports",
    "supports_multiplication",
    "triangle_attention",
    "triangle_multiplication",
]
