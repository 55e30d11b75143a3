"""Records of several sittings, or of an archived run, become one run folder."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline import cli, launch
from pipeline.archive import archive
from pipeline.config import ExperimentConfig
from pipeline.folder import FolderError, RunFolder
from pipeline.gather import gather
from pipeline.plan import plan
from pipeline.records import DamagedRecord, Record, Status
from pipeline.site import LocalSite
from pipeline.status import print_status

OK, UNSUPPORTED, FAILED = Status.OK, Status.UNSUPPORTED, Status.FAILED


def config(*implementations: str) -> ExperimentConfig:
    names = list(implementations or ("eager", "sdpa"))
    return ExperimentConfig.model_validate(
        {"name": "t", "accuracy": {"implementations": names, "crops": [16], "head_dims": [16], "slices": 2, "cases": 1}}
    )


def sitting(
    root: Path, statuses: dict[str, Status], at: str = "1", digest: str = "k", settings: ExperimentConfig | None = None
) -> RunFolder:
    folder = RunFolder(root)
    settings = settings or config()
    folder.adopt(settings)
    for cell in plan(settings):
        if cell.implementation in statuses:
            status = statuses[cell.implementation]
            folder.store.write(
                Record(
                    cell=cell,
                    cell_id=cell.id,
                    status=status,
                    reason=None if status is OK else f"at {at}",
                    kernel_digest=digest,
                    finished=at,
                )
            )
    return folder


def found(folder: RunFolder) -> dict[str, tuple[Status, str]]:
    return {record.cell.implementation: (record.status, record.finished) for record in folder.store.read_all().records}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (OK, OK, (OK, "2")),  # the newest
        (OK, FAILED, (OK, "1")),
        (OK, UNSUPPORTED, (OK, "1")),
        (UNSUPPORTED, FAILED, (UNSUPPORTED, "1")),
        (UNSUPPORTED, Status.NOT_RUN, (UNSUPPORTED, "1")),  # that one machine was too small says nothing of the cell
        (Status.NOT_RUN, FAILED, (FAILED, "2")),
    ],
)
def test_the_best_record_of_a_cell_counts(tmp_path: Path, first: Status, second: Status, expected: tuple[Status, str]) -> None:
    a, b = sitting(tmp_path / "a", {"eager": first}, "1"), sitting(tmp_path / "b", {"eager": second}, "2")
    for name, sources in (("ab", [a, b]), ("ba", [b, a])):
        target = RunFolder(tmp_path / name)
        result = gather(target, sources, config(), "k")
        assert found(target) == {"eager": expected}
        assert (result.taken, result.superseded) == (1, 1)
    assert found(a) == {"eager": (first, "1")} and found(b) == {"eager": (second, "2")}


def test_what_is_there_is_only_bettered(tmp_path: Path) -> None:
    target = sitting(tmp_path / "run", {"eager": OK, "sdpa": FAILED}, "2")
    result = gather(target, [sitting(tmp_path / "a", {"eager": OK, "sdpa": OK}, "1"), target], config(), "k")
    assert found(target) == {"eager": (OK, "2"), "sdpa": (OK, "1")}
    assert (result.taken, result.there, result.superseded) == (1, 1, 3)
    assert str(gather(target, [target], config(), "k")) == "0 records taken, 2 were there"


def on(folder: RunFolder, gpu: str | None) -> RunFolder:
    """The folder with its records as if made on a GPU, or on a CPU."""
    machine = {"device": "cuda", "gpu": {"name": gpu}} if gpu else {"device": "cpu", "gpu": None}
    for record in folder.store.read_whole():
        folder.store.write(record.model_copy(update={"environment": machine}))
    return folder


def test_a_record_of_a_cpu_replaces_none_of_a_gpu(tmp_path: Path) -> None:
    target = on(sitting(tmp_path / "run", {"eager": OK, "sdpa": UNSUPPORTED}, "1"), "NVIDIA H200")
    cpu = on(sitting(tmp_path / "cpu", {"eager": OK, "sdpa": OK}, "2"), None)
    assert gather(target, [cpu], config(), "k").there == 2
    assert found(target) == {"eager": (OK, "1"), "sdpa": (UNSUPPORTED, "1")}
    assert gather(cpu, [target], config(), "k").taken == 2 and found(cpu) == found(target)


def test_a_failure_that_knows_no_machine_replaces_no_numbers(tmp_path: Path) -> None:
    """Slurm, or the ranks of a cell, told of it."""
    target = on(sitting(tmp_path / "run", {"eager": OK}, "1"), None)
    assert gather(target, [sitting(tmp_path / "lost", {"eager": Status.NODE_FAIL}, "2")], config(), "k").there == 1
    assert found(target) == {"eager": (OK, "1")}


def test_numbers_of_two_kinds_of_gpu_are_refused(tmp_path: Path) -> None:
    a, b = on(sitting(tmp_path / "a", {"eager": OK}), "NVIDIA H200"), on(sitting(tmp_path / "b", {"eager": OK}, "2"), "NVIDIA H100")
    with pytest.raises(FolderError, match="has numbers of NVIDIA H200 and of NVIDIA H100; gather the runs of one kind of GPU at a time"):
        gather(RunFolder(tmp_path / "run"), [a, b], config(), "k")
    failed = on(sitting(tmp_path / "c", {"eager": FAILED}, "3"), "NVIDIA H100")
    gather(RunFolder(tmp_path / "run"), [a, failed], config(), "k")


def test_what_is_replaced_is_set_aside(tmp_path: Path) -> None:
    target = sitting(tmp_path / "run", {"eager": FAILED, "sdpa": OK}, "1", digest="old")
    gather(target, [sitting(tmp_path / "a", {"eager": OK, "sdpa": OK}, "2")], config(), "k")
    assert found(target) == {"eager": (OK, "2"), "sdpa": (OK, "2")}
    assert len(list((target.store.root / "stale").rglob("*.json"))) == 2


def test_that_a_cell_was_stopped_says_nothing_of_it(tmp_path: Path) -> None:
    target = RunFolder(tmp_path / "run")
    result = gather(target, [sitting(tmp_path / "a", {"eager": Status.CANCELLED, "sdpa": OK})], config(), "k")
    assert found(target) == {"sdpa": (OK, "1")}
    assert str(result) == "1 records taken, 1 left out: of cells that were stopped"


def test_other_kernel_sources_and_other_cells_are_left_out(tmp_path: Path) -> None:
    old = sitting(tmp_path / "old", {"eager": OK}, digest="other")
    more = sitting(tmp_path / "more", {"eager": OK, "lma": OK}, settings=config("eager", "lma"))
    target = RunFolder(tmp_path / "run")
    result = gather(target, [old, more], config(), "k")
    assert found(target) == {"eager": (OK, "1")} and (result.outdated, result.unplanned) == (1, 1)
    assert str(result) == ("1 records taken, 1 left out: of other kernel sources, 1 left out: of cells that are not in the configuration")


def test_refused_before_anything_is_written(tmp_path: Path) -> None:
    target, good = RunFolder(tmp_path / "run"), sitting(tmp_path / "a", {"eager": OK})
    with pytest.raises(FolderError, match="empty holds no records"):
        gather(target, [good, RunFolder(tmp_path / "empty")], config(), "k")
    broken = sitting(tmp_path / "b", {"eager": OK})
    broken.store.path(plan(config())[0]).write_text("{")
    with pytest.raises(DamagedRecord):
        gather(target, [good, broken], config(), "k")
    assert not found(target) and not target.config_path.exists()
    with pytest.raises(FolderError, match="belongs to another configuration"):
        gather(sitting(tmp_path / "c", {"lma": OK}, settings=config("lma")), [good], config(), "k")


def test_an_archived_run_is_carried_on_in_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "kernel_digest", lambda: "k")
    monkeypatch.setattr("pipeline.status.kernel_digest", lambda: "k")
    monkeypatch.chdir(tmp_path)
    sitting(tmp_path / "run", {"eager": OK})
    archived = RunFolder(tmp_path / "archive")
    archived.adopt(config())
    archived.store.write_archive(RunFolder(tmp_path / "run").store.read_whole())
    before = archived.store.archive.read_bytes()

    print_status(archived.root)
    assert f"to do: 1 cells of the configuration t; `python -m pipeline gather results/<name> {archived.root} && python -m" in (
        capsys.readouterr().out
    )
    for refused in (lambda: launch.run(config(), LocalSite(), archived.root), lambda: gather(archived, [RunFolder("run")], config(), "k")):
        with pytest.raises(
            FolderError, match="archived run, which no run changes; make a run folder of it with `python -m pipeline gather"
        ):
            refused()
    assert not archived.jobs.exists()

    done = CliRunner().invoke(cli.app, ["gather", "again", str(archived.root)])
    assert done.exit_code == 0 and done.output == "1 records taken\n", done.output
    again = RunFolder(tmp_path / "again")
    assert again.read_config() == config() and found(again) == {"eager": (OK, "1")}
    assert [item.cell.implementation for item in again.pending(plan(config()), "k").items] == ["sdpa"]
    assert archived.store.archive.read_bytes() == before


def test_an_archive_is_made_of_a_run_that_has_what_it_held(tmp_path: Path) -> None:
    run, target = sitting(tmp_path / "run", {"eager": OK, "sdpa": FAILED}), RunFolder(tmp_path / "archive")
    assert archive(run, target, config("eager", "sdpa", "lma")) == 2
    assert target.read_config() == config("eager", "sdpa", "lma") and found(target) == found(run)
    assert archive(sitting(tmp_path / "later", {"eager": OK, "sdpa": OK}, "2"), target, config("eager", "sdpa", "lma")) == 2
    assert found(target) == {"eager": (OK, "2"), "sdpa": (OK, "2")}


def test_archives_that_would_lose_something_are_refused(tmp_path: Path) -> None:
    run, target = sitting(tmp_path / "run", {"eager": OK, "sdpa": OK}), RunFolder(tmp_path / "archive")
    for refused, settings, why in (
        ((run, run), config(), "run is a run folder; name another for the archive"),
        ((run, sitting(tmp_path / "other", {"lma": OK}, settings=config("lma"))), config(), "other is a run folder"),
        ((sitting(tmp_path / "empty", {}), target), config(), "empty holds no records to archive"),
        ((run, target), config("eager"), "the configuration lacks 1 cells of .*run, such as accuracy-sdpa"),
    ):
        with pytest.raises(FolderError, match=why):
            archive(*refused, settings)
    assert not target.root.exists() and not run.store.archive.exists()
    archive(run, target, config())
    before = target.store.archive.read_bytes()
    with pytest.raises(
        FolderError, match=r"archive has numbers of 1 cells that .*less lacks, such as accuracy-sdpa.* put the two together"
    ):
        archive(sitting(tmp_path / "less", {"eager": OK, "sdpa": FAILED}, "2"), target, config())
    assert target.store.archive.read_bytes() == before
