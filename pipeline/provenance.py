"""Where numbers came from, in words: the footnotes of tables and the environment block of the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.records import Record, Status

NO_DEVICE = "no device"


def machine(environment: Mapping[str, Any]) -> str:
    """The name of the machine a record came from: its GPU model, else "CPU" with the processor's name."""
    if environment.get("gpu"):
        return str(_block(environment, "gpu").get("name") or "unknown GPU")
    return f"CPU ({environment['cpu'] or 'unknown processor'})" if "cpu" in environment else NO_DEVICE


def _block(environment: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the environment; empty when it is absent, or no mapping (records of other programs may hold anything)."""
    found = environment.get(name)
    return found if isinstance(found, Mapping) else {}


def facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """What :func:`pipeline.environment.collect` found, in words; what it could not find is left out, except for clocks."""
    gpu, git = _block(environment, "gpu"), _block(environment, "git")
    limit, commit = gpu.get("power_limit_w"), str(git.get("commit") or "")[:12]
    found: dict[str, object] = {
        "power limit": None if limit is None else f"{limit:.0f} W" if isinstance(limit, float) else f"{limit} W",
        "driver": gpu.get("driver"),
        "clocks": _clocks(gpu) if gpu else None,
        "processor": environment.get("cpu"),
        "processor cores": environment.get("cpu_count"),
        "torch": environment.get("torch"),
        "threads": environment.get("threads") if not gpu else None,
        "CUDA": environment.get("cuda"),
        "Triton": environment.get("triton"),
        "Python": environment.get("python"),
        "system": environment.get("os"),
        "TF32": None if environment.get("tf32") is None else "allowed" if environment["tf32"] else "not allowed",
        "container": str(environment.get("container_digest") or "")[:19] or None,
        "commit": commit + (" with local changes" if git.get("dirty") else "") if commit else None,
    }
    return {words: str(value) for words, value in found.items() if value is not None}


def _clocks(gpu: Mapping[str, Any]) -> str:
    locked = gpu.get("clocks_locked")
    return "lock state unknown" if locked is None else "locked" if locked else "not locked"


#: The facts that footnotes tell; the report tells all.
IN_FOOTNOTES = ("power limit", "driver", "clocks", "torch", "threads", "CUDA", "commit", "kernel sources")


def environments(records: Iterable[Record]) -> dict[str, dict[str, list[str]]]:
    """By machine, every fact with the distinct values that its records have (one value, unless something changed)."""
    result: dict[str, dict[str, list[str]]] = {}
    for record in sorted(records, key=lambda r: (r.finished, r.cell_id)):
        if not record.environment:
            continue
        known = result.setdefault(machine(record.environment), {})
        for words, value in (facts(record.environment) | {"kernel sources": record.kernel_digest[:12]}).items():
            values = known.setdefault(words, [])
            if value not in values:
                values.append(value)
    return dict(sorted(result.items()))


def footnotes(experiment: str, records: Sequence[Record]) -> list[str]:
    """What a reader must know to believe a table: one note a machine, one on the measurement, one on the counts.

    The claims rest on all records; a table without records of its own has no notes.
    """
    mine = [r for r in records if experiment in ("claims", r.cell.experiment)]
    notes = []
    for device, known in environments(mine).items():
        rest = "; ".join(f"{words} {_values(values)}" for words, values in known.items() if words in IN_FOOTNOTES)
        notes.append(f"{device}: {rest}.")
    done = [r for r in mine if r.status is Status.OK]
    if timing := _timing(done):
        notes.append(timing)
    if mine:
        rest = "; the rest are rows with their reason" if len(done) < len(mine) else ""
        notes.append(f"{len(done)} of {len(mine)} records hold numbers{rest}.")
    return notes


def _values(values: Sequence[str]) -> str:
    return " and ".join(values) if len(values) <= 3 else f"{values[0]} and {len(values) - 1} others"


def _timing(done: Sequence[Record]) -> str | None:
    timers = sorted({str(r.metrics["timer"]) for r in done if "timer" in r.metrics})
    if not timers:
        return None
    warmup = _range(r.metrics.get("warmup_iters") for r in done)
    measured = _range(r.metrics.get("measured_iters") for r in done)
    calls = f"{warmup} warm-up calls, median of {measured} measured calls"
    return f"Timer: {' and '.join(timers)}; {calls}; a time's spread is (p90 - p10) / median."


def _range(values: Iterable[object]) -> str:
    numbers = sorted({int(v) for v in values if isinstance(v, int | float)})
    if not numbers:
        return "an unrecorded number of"
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"
