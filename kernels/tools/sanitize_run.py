"""What the cases for compute-sanitizer share (see sanitize.sh): the command line, and the check of results."""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

Case = TypeVar("Case")


def require_finite(results: Iterable[torch.Tensor], case: object) -> None:
    """Exit naming the case unless all results are finite."""
    # On the CPU: a check on the GPU would be more kernels of PyTorch.
    if not all(result.detach().cpu().isfinite().all() for result in results):
        raise SystemExit(f"not finite: {case}")


def main(description: str | None, call: Callable[[Case], None], essential: Sequence[Case], more: Sequence[Case]) -> None:
    """Run the cases; ``--quick`` keeps the essential ones, for racecheck, which is slow."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true")
    cases = [*essential] if parser.parse_args().quick else [*essential, *more]
    start = time.monotonic()
    for case in cases:
        call(case)
    torch.cuda.synchronize()
    print(f"{len(cases)} cases ran in {time.monotonic() - start:.0f} s")
