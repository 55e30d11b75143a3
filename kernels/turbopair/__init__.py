"""turbopair: fast, exact, reproducible pair-stack kernels for AlphaFold3-class training.

The public door is :func:`triangle_attention`; :func:`supports` tells beforehand whether a call would be accepted. Importing the
package needs neither a GPU nor a CUDA compiler nor the built kernel library.
"""

from turbopair.native import NativeUnavailable, kernel_digest
from turbopair.triangle_attention import DEFAULT_PRECISION, PRECISIONS, supports, triangle_attention

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_PRECISION",
    "PRECISIONS",
    "NativeUnavailable",
    "__version__",
    "kernel_digest",
    "supports",
    "triangle_attention",
]
