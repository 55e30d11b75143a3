"""Start Snakemake so that a signal sent to it reaches the commands that it started.

A Ctrl-C in a terminal reaches every process of the group. A signal sent to Snakemake alone (by a batch system, a service
manager, `kill`) does not reach the commands which submit and wait; this small parent forwards it to the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType


def snakemake(arguments: Sequence[str]) -> int:
    """Run ``snakemake`` with ``arguments``, all passed on unchanged; returns its exit status (128 + signal when killed)."""
    process = subprocess.Popen([sys.executable, "-m", "snakemake", *arguments], start_new_session=True)

    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    code = process.wait()
    return code if code >= 0 else 128 - code
