"""What the command line says and writes where nothing, or not everything, went well."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline import cli
from pipeline.config import ExperimentConfig
from pipeline.folder import RunFolder
from pipeline.plan import plan
from pipeline.records import Record, Status, failure

CONFIG = ExperimentConfig.model_validate(
    {"name": "t", "accuracy": {"implementations": ["eager", "trifast"], "crops": [16], "head_dims": [16], "cases": 1}}
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.adopt(CONFIG)
    return found


def test_without_a_record_the_tables_say_that_nothing_ran(folder: RunFolder) -> None:
    done = CliRunner().invoke(cli.app, ["tables", str(folder.root)])
    assert done.exit_code == 2
    assert "warning: no cell has succeeded" in done.output
    assert "not run" in (folder.root / "tables/accuracy.md").read_text()


def test_without_a_success_the_tables_have_the_reasons(folder: RunFolder) -> None:
    for cell, reason in zip(plan(CONFIG), ("it broke here", "pip install trifast"), strict=True):
        status = Status.FAILED if cell.implementation == "eager" else Status.NOT_INSTALLED
        folder.store.write(failure(cell, status, reason, kernel_digest="k"))
    done = CliRunner().invoke(cli.app, ["tables", str(folder.root)])
    assert done.exit_code == 2
    for name in ("tables/accuracy.md", "tables/accuracy.tex", "report.html"):
        text = (folder.root / name).read_text()
        assert "it broke here" in text and "pip install trifast" in text, name
    assert (folder.root / "claims.md").exists()


def test_claims_in_the_terminal(folder: RunFolder) -> None:
    (cell, _) = plan(CONFIG)
    folder.store.write(Record(cell=cell, cell_id=cell.id, status=Status.OK, kernel_digest="k"))
    done = CliRunner().invoke(cli.app, ["show", "claims", str(folder.root)], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "Claims of the paper"
    assert len(lines) > 5 and all(line.startswith("not run") for line in lines[1:]), lines
