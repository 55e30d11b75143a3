"""Where the kernels run: on which devices, and with which releases of Triton."""

from __future__ import annotations

from functools import lru_cache

import torch

from turbopair.triangle_multiplication import cuda

#: The launches use what is internal to Triton: 3.6 and 3.7 have it alike, 3.8 has another (``make_tensordesc_arg``).
RELEASES = ("3.6", "3.7")


def supports(device: torch.device) -> str | None:
    """Why the kernels cannot run on `device`, or None. The reason says what to do."""
    return cuda.supports(device) or _other_release()


@lru_cache(maxsize=1)
def _other_release() -> str | None:
    import triton

    if any(triton.__version__.startswith(f"{release}.") for release in RELEASES):
        return None
    return (
        f"triangle multiplication's kernels need Triton {' or '.join(RELEASES)} (PyTorch 2.13 has 3.7), {triton.__version__} is installed:"
        " pip install 'triton>=3.6,<3.8', with a PyTorch that takes it"
    )
