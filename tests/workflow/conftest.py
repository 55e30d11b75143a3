"""What the workflow tests share: a tiny configuration, and the command line as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import REPOSITORY
from pipeline.folder import RunFolder
from pipeline.records import Record

PEERS = Path(__file__).with_name("peers")
sys.path.append(str(PEERS))  # tests read constants of the modules there


class Run:
    """A run in a folder of its own, started as `python -m pipeline run`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = folder / "results"
        self.mended = folder / "mended"
        self.config = folder / "config.yaml"
        self.site = folder / "site.yaml"
        self.environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PEERS}:{REPOSITORY}", "ODD_PEERS_MENDED": str(self.mended),
            "COLUMNS": "200",
        }  # fmt: skip
        self.write_site(executor="local", device="cpu", threads=1)

    def write_config(self, *implementations: str, **section: Any) -> None:
        base = {"crops": [16], "head_dims": [16], "slices": 2, "families": ["normal"], "cases": 1, "cell_timeout_s": 60}
        accuracy = {"implementations": list(implementations), **base, **section}
        self.config.write_text(yaml.safe_dump({"name": "tiny", "plugins": ["odd_peers"], "accuracy": accuracy}))

    def write_site(self, **settings: Any) -> None:
        self.site.write_text(yaml.safe_dump(settings))

    def arguments(self, *more: str) -> list[str]:
        return [
            sys.executable, "-m", "pipeline", "run", "--config", str(self.config), "--site", str(self.site),
            "--results", str(self.results), "--no-tables", *more,
        ]  # fmt: skip

    def start(self, *more: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.arguments(*more), cwd=REPOSITORY, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            **options,
        )  # fmt: skip

    def __call__(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.call(self.arguments(*more))

    def call(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            arguments, cwd=REPOSITORY, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
            check=False,
        )  # fmt: skip

    def records(self) -> dict[str, list[Record]]:
        """The records by implementation."""
        found: dict[str, list[Record]] = {}
        for record in RunFolder(self.results).store.read_all().records:
            found.setdefault(record.cell.implementation, []).append(record)
        return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)
