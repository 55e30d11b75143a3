"""Start Snakemake so that a signal sent to it reaches the commands that it started, and what the Snakefile checks before any rule.

A Ctrl-C in a terminal reaches every process of the group. A signal sent to Snakemake alone (by a batch system, a service
manager, `kill`) does not reach the commands which submit and wait; this small parent forwards it to the group.

What every rule would refuse is told once, and ends Snakemake with status 2: it would add a traceback, and one copy for each rule.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pipeline import config as configuration
from pipeline import site as sites
from pipeline.config import ExperimentConfig
from pipeline.folder import FolderError, RunFolder
from pipeline.launch import check_fit
from pipeline.loading import ConfigError, nearest
from pipeline.site import Site

#: When Snakemake does not end after a signal: seconds since that signal, and what its group is sent then. A rule that began just
#: after the signal needs the first; it does not disturb one that is stopping, which takes at most :data:`pipeline.local.STOP_S` or
#: the minute of a `scancel` (:func:`pipeline.slurm_state.ask`) and has both before the last.
INSIST = ((25.0, signal.SIGINT), (90.0, signal.SIGKILL))


def snakemake(arguments: Sequence[str]) -> int:
    """Run ``snakemake`` with ``arguments``, all passed on unchanged; returns its exit status (128 + signal when stopped)."""
    stopped: list[int] = []
    timers: list[threading.Timer] = []
    # Whoever starts this in the background of a script has it ignore SIGINT, and Snakemake would inherit that; a handler is not inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen([sys.executable, "-m", "snakemake", *arguments], start_new_session=True)

    def send(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    def insist(seconds: float, number: signal.Signals) -> None:
        send(number)  # first: after a SIGHUP there may be no terminal to print to
        print(f"Snakemake did not stop within {seconds:g} s; sent {number.name} to it and its commands", file=sys.stderr)

    def forward(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        send(number)
        if not timers:
            timers.extend(threading.Timer(more[0], insist, more) for more in INSIST)
            for timer in timers:
                timer.start()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    code = process.wait()
    for timer in timers:
        timer.cancel()
    if code and stopped:
        # Snakemake calls every rule that was interrupted an error, at length: the last word says what happened
        print("stopped; the same command carries on with what is left", file=sys.stderr)
        return 128 + stopped[0]
    return code if code >= 0 else 128 - code


def values(config: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, str]:
    """The values of Snakemake's ``--config`` as they were written: it makes numbers of 1e5 and 2026_11_30.

    ``arguments`` are Snakemake's own; those of the processes that it starts itself are encoded, and are not for this.
    """
    written = _options(arguments).config or []
    read_by_snakemake = {key: str(value) for key, value in config.items() if value is not None}
    return read_by_snakemake | dict(item.split("=", 1) for item in written)


def read(config: Path, site: Path) -> tuple[ExperimentConfig, Site]:
    """What to run, and where."""
    with _clear_errors():
        return configuration.read(config), sites.load(site)


def threads(site: Site, cores: int | None) -> int:
    """How many of Snakemake's ``cores`` a rule takes: measurements on this machine must not run side by side, those in Slurm's jobs may."""
    if cores is None:
        _refuse("Snakemake needs a profile: add --profile config/profiles/local, or config/profiles/slurm on a login node")
    return cores if site.executor == "local" else 1


def check(config: ExperimentConfig, site: Site, results: Path, arguments: Sequence[str], rules: Collection[str]) -> None:
    """Refuse a target that does not exist, and a folder or a site in which no rule of ``config`` could run.

    ``arguments`` are Snakemake's own: it has not read its targets when it reads the Snakefile. ``rules`` may be targets.
    """
    targets = _options(arguments).targets
    for target in targets:
        if target not in rules and "/" not in target:  # every file of the workflow is in a folder
            _refuse(f"no target {target!r}{nearest(target, rules)}; there are {', '.join(rules)}")
    if set(targets) == {"container"}:
        return  # an image is of no run
    with _clear_errors():
        check_fit(config, site)
        folder = RunFolder(results)
        folder.refuse_archive()
        folder.refuse_other(config)


def _options(arguments: Sequence[str]) -> Namespace:
    from snakemake.cli import get_argument_parser

    return get_argument_parser().parse_known_args(arguments)[0]


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except (ConfigError, FolderError) as error:
        _refuse(str(error))


def _refuse(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)
