import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pipeline import doctor, slurm_state, status
from pipeline.cells import OPERATORS
from pipeline.config import ExperimentConfig
from pipeline.folder import RunFolder
from pipeline.plan import plan
from pipeline.records import Record, Status, failure
from pipeline.status import print_status, read_status, write_status

CONFIG = ExperimentConfig.model_validate(
    {"name": "t", "accuracy": {"implementations": ["eager", "sdpa", "trifast", "lma"], "crops": [16], "head_dims": [16], "cases": 2}}
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    found = RunFolder(tmp_path)
    found.adopt(CONFIG)
    monkeypatch.setattr(status, "kernel_digest", lambda: "k")
    for cell in plan(CONFIG):
        if cell.implementation == "eager":
            found.store.write(Record(cell=cell, cell_id=cell.id, status=Status.OK, kernel_digest="k"))
        elif cell.implementation == "sdpa":
            found.store.write(failure(cell, Status.OOM, "out of memory [8 GiB]", kernel_digest="k", attempt=2))
        elif cell.implementation == "trifast":
            found.store.write(failure(cell, Status.NOT_INSTALLED, "pip install trifast", kernel_digest="k"))
    found.store.path(plan(CONFIG)[0]).write_text("{")
    return found


def test_what_is_done_missing_and_failed(folder: RunFolder) -> None:
    found = read_status(folder.root)
    assert dict(found.totals) == {"ok": 1, "missing": 3, "oom": 2, "not_installed": 2}
    assert len(found.damaged) == 1
    assert found.unplanned == 0
    stream = io.StringIO()
    print_status(folder.root, Console(file=stream, width=200))
    text = stream.getvalue()
    assert "out of memory [8 GiB]" in text  # square brackets are no markup
    assert "not installed: trifast (2 cells): pip install trifast" in text
    assert "damaged record" in text
    command = f"python -m pipeline run --config {folder.root}/config.yaml --results {folder.root}"
    assert f"to do: 5 cells of the configuration t; `{command}` computes them" in text


def test_records_of_other_kernel_sources_are_to_do(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "kernel_digest", lambda: "new")
    found = read_status(folder.root)
    assert dict(found.totals) == {"missing": 3, "outdated": 5}
    stream = io.StringIO()
    print_status(folder.root, Console(file=stream, width=200))
    assert "outdated: 5 records are of other kernel sources than those here" in stream.getvalue()
    assert "to do: 8 cells" in stream.getvalue()


def test_only_what_is_not_available_left_is_complete(folder: RunFolder) -> None:
    for cell in plan(CONFIG):
        if cell.implementation != "trifast":
            folder.store.write(Record(cell=cell, cell_id=cell.id, status=Status.OK, kernel_digest="k"))
    stream = io.StringIO()
    print_status(folder.root, Console(file=stream, width=200))
    assert stream.getvalue().splitlines()[-1] == "complete"


def test_what_is_too_large_for_this_machine_has_not_failed(folder: RunFolder) -> None:
    for cell in plan(CONFIG):
        if cell.implementation in ("eager", "lma"):
            folder.store.write(Record(cell=cell, cell_id=cell.id, status=Status.OK, kernel_digest="k"))
        elif cell.implementation == "sdpa":
            folder.store.write(failure(cell, Status.NOT_RUN, "needs 16 GPUs together", kernel_digest="k"))
    assert not read_status(folder.root).bad
    stream = io.StringIO()
    print_status(folder.root, Console(file=stream, width=200))
    lines = stream.getvalue().splitlines()
    assert "not run: sdpa (2 cells): needs 16 GPUs together" in lines and lines[-1] == "complete"
    assert not any("failed" in line for line in lines)
    assert next(line.split() for line in lines if "sdpa" in line) == ["accuracy", "sdpa", "2"]


def test_the_status_for_other_programs(folder: RunFolder) -> None:
    write_status(folder.root)
    data = json.loads((folder.root / "status.json").read_text())
    assert data["totals"]["oom"] == 2
    assert {entry["reason"] for entry in data["failed"]} == {"out of memory [8 GiB]"}
    assert {"experiment": "accuracy", "operator": "triangle_attention", "implementation": "lma", "missing": 2} in data["experiments"]


def test_one_name_in_two_operators_has_a_line_in_each(tmp_path: Path) -> None:
    settings = {"crops": [16], "cases": 1}
    attention = {**settings, "implementations": ["eager"], "head_dims": [16]}
    multiplication = {**settings, "implementations": ["eager"], "channels": 32, "directions": ["outgoing"]}
    config = ExperimentConfig.model_validate({"name": "t", "accuracy": attention, "multiplication": {"accuracy": multiplication}})
    folder = RunFolder(tmp_path)
    folder.adopt(config)
    counts = read_status(folder.root).counts
    assert counts == {("accuracy", "eager"): {"missing": 1}, ("accuracy_multiplication", "eager"): {"missing": 1}}


def test_the_doctor_looks_at_everything() -> None:
    from pipeline import implementations

    findings = doctor.examine()
    for operator in OPERATORS:
        assert implementations.names(operator) == [found.subject for found in findings if found.operator == operator]
    assert {"PyTorch", "nvcc", "turbopair kernels", "Slurm", "container runtime"} <= {found.subject for found in findings}
    assert all(found.good for found in findings if found.subject == "eager")
    stream = io.StringIO()
    assert doctor.print_report(console=Console(file=stream, width=200))
    assert "triangle multiplication" in stream.getvalue()


def test_the_doctor_says_what_a_site_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("executor: slurm\npartition: gpus,gpu\ncontainer: {runtime: apptainer, image: /no/such.sif}")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None if name == "apptainer" else f"/usr/bin/{name}")
    monkeypatch.setattr(doctor, "_compiler", lambda: iter(()))
    monkeypatch.setattr(slurm_state, "partitions", lambda: ["gpu"])
    monkeypatch.setattr(slurm_state, "ask", lambda _: None)
    wrong = {finding.subject: finding for finding in doctor.examine(site) if finding.good is False}
    assert set(wrong) == {"site: partition", "container runtime", "container image"}
    assert (wrong["site: partition"].text, wrong["site: partition"].advice) == ("gpus does not exist", "one of gpu")
    assert "submitit" not in wrong
