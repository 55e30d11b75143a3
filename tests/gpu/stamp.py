"""Collects the outcome of the GPU suite and writes the validation stamp of a card."""

import datetime
import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import turbopair

SUITE = Path(__file__).parent
SCHEMA = 1


class StampRecorder:
    """A pytest plugin, with or without xdist. Figures come from the tests' ``record_property``: ``max.*`` keeps the largest value,
    ``count.*`` adds up."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.selected: set[str] = set()
        self.may_skip: set[str] = set()
        self.passed: set[str] = set()
        self.skipped: set[str] = set()
        self.failed: set[str] = set()
        self.figures: dict[str, float] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected |= {item.nodeid for item in session.items if item.path.parent == SUITE}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """With xdist the workers collect; this process only hears of it."""
        self.selected |= {name for name in ids if (self.config.rootpath / name.partition("::")[0]).parent == SUITE}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "may_skip" in report.keywords:
            self.may_skip.add(report.nodeid)
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)
        if report.when == "call":
            for name, value in report.user_properties:
                self._add(name, value)

    @property
    def deselected(self) -> bool:
        """Whether the command line chose a part of the suite."""
        option = self.config.option
        files = {self.config.rootpath / name.partition("::")[0] for name in self.selected}
        chosen = option.keyword or option.markexpr not in ("", "gpu") or any("::" in argument for argument in self.config.args)
        return bool(chosen) or files != set(SUITE.glob("test_*.py"))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        reason = self.refusal()
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if not self.selected or reporter is None:
            return
        if reason is not None:
            reporter.write_line(f"\nno validation stamp: {reason}")
            return
        reporter.write_line(f"\nvalidation stamp: {write(self.config.rootpath, self.content())}")

    def refusal(self) -> str | None:
        """Why this run does not validate the card, or None."""
        failed = self.failed & self.selected
        if failed:
            return f"{len(failed)} tests failed"
        if self.deselected:
            return "only part of the GPU suite was selected"
        skipped = (self.skipped & self.selected) - self.may_skip
        if skipped:
            return f"{len(skipped)} tests were skipped, such as {min(skipped)}"
        missing = self.selected - self.passed - self.skipped
        return f"{len(missing)} tests did not run" if missing else None

    def content(self) -> dict[str, Any]:
        """What the stamp says; needs the GPU."""
        index = torch.cuda.current_device()
        return {
            "schema": SCHEMA,
            "kernel_digest": turbopair.kernel_digest(),
            "turbopair": turbopair.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "gpu": torch.cuda.get_device_name(index),
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
            **_driver(index),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _triton(),
            "python": platform.python_version(),
            "tests": len(self.passed),
            "skipped": sorted(self.skipped & self.selected),
            "figures": dict(sorted(self.figures.items())),
        }

    def _add(self, name: str, value: Any) -> None:
        if name.startswith("max."):
            self.figures[name] = max(float(value), self.figures.get(name, float("-inf")))
        elif name.startswith("count."):
            self.figures[name] = self.figures.get(name, 0) + int(value)
        else:
            self.figures[name] = value


def write(root: Path, content: dict[str, Any]) -> Path:
    """Write the stamp of a card in one step and return its path."""
    path = root / "results" / "validation" / f"{slug(content['gpu'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)
    return path


def slug(name: str) -> str:
    """``NVIDIA H200`` to ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _driver(index: int) -> dict[str, Any]:
    try:
        import pynvml
    except ImportError:
        return {"driver": None, "power_limit_w": None}
    try:
        pynvml.nvmlInit()
        # CUDA_VISIBLE_DEVICES renumbers devices for CUDA but not for NVML; the UUID names the same card in both.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        watts = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        return {"driver": pynvml.nvmlSystemGetDriverVersion(), "power_limit_w": watts}
    except pynvml.NVMLError as error:
        return {"driver": f"unknown: {error}", "power_limit_w": None}


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
