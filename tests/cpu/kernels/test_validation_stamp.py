"""The committed GPU validation stamp belongs to the committed kernels, and the recorder writes none that is not earned."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import turbopair
from tests.gpu import stamp

ROOT = Path(__file__).resolve().parents[3]
RENEW = "run `python -m pytest tests/gpu -m gpu` on the Hopper GPU and commit results/validation/ (it is written when every test passed)"


def test_committed_stamp_is_of_these_kernels() -> None:
    if not list((ROOT / "kernels/csrc").glob("*.cu")):
        pytest.skip("no CUDA sources in this tree")
    stamps = sorted((ROOT / "results/validation").glob("*.json"))
    assert stamps, f"no GPU validation stamp; {RENEW}"
    for path in stamps:
        content = json.loads(path.read_text())
        assert content["schema"] == stamp.SCHEMA, f"{path.name} has schema {content['schema']}, this suite writes {stamp.SCHEMA}; {RENEW}"
        assert path.stem == stamp.slug(content["gpu"])
        assert content["kernel_digest"] == turbopair.kernel_digest(), (
            f"{path.name} of {content['date']} validates kernels {content['kernel_digest'][:12]}, this tree has "
            f"{turbopair.kernel_digest()[:12]}: the kernels changed since; {RENEW}"
        )
        assert content["tests"] > 0


FILES = sorted(path.name for path in stamp.SUITE.glob("test_*.py"))


def configuration(arguments: list[str], keyword: str = "", markexpr: str = "gpu") -> Any:
    return SimpleNamespace(args=arguments, rootpath=ROOT, option=SimpleNamespace(keyword=keyword, markexpr=markexpr))


def recorder(extra: str = "", **states: str) -> stamp.StampRecorder:
    """A recorder after a session in which one test of each file passed, and ``extra`` tests ended in the named states."""

    def names(words: str) -> set[str]:
        return {f"tests/gpu/{FILES[0]}::{word}" for word in words.split()}

    made = stamp.StampRecorder(configuration(["tests/gpu"]))
    made.passed = {f"tests/gpu/{file}::t" for file in FILES}
    made.selected = made.passed | names(extra)
    for state, words in states.items():
        getattr(made, state).update(names(words))
    return made


@pytest.mark.parametrize(
    "states,reason",
    [
        ({"passed": "a b"}, None),
        ({"passed": "a", "skipped": "b", "may_skip": "b"}, None),
        ({"passed": "a", "failed": "b"}, "1 tests failed"),
        ({"passed": "a b", "failed": "b"}, "1 tests failed"),
        ({"passed": "a", "skipped": "b"}, f"1 tests were skipped, such as tests/gpu/{FILES[0]}::b"),
        ({"passed": "a"}, "1 tests did not run"),
    ],
)
def test_only_a_whole_passing_run_validates(states: dict[str, str], reason: str | None) -> None:
    assert recorder("a b", **states).refusal() == reason


@pytest.mark.parametrize(
    "config",
    [
        configuration(["tests/gpu"], keyword="shapes"),
        configuration(["tests/gpu"], markexpr="gpu and not slow"),
        configuration([f"tests/gpu/{FILES[0]}::t"]),
    ],
)
def test_a_part_of_the_suite_does_not_validate(config: Any) -> None:
    made = recorder()
    assert made.refusal() is None
    made.config = config
    assert made.refusal() == "only part of the GPU suite was selected"


def test_a_missing_file_does_not_validate() -> None:
    made = recorder()
    made.selected = {name for name in made.selected if FILES[0] not in name}
    assert made.refusal() == "only part of the GPU suite was selected"


def test_workers_of_xdist_report_their_collection() -> None:
    made = stamp.StampRecorder(configuration(["tests/gpu"]))
    made.pytest_xdist_node_collection_finished(None, [f"tests/gpu/{FILES[0]}::a", "tests/cpu/test_x.py::b"])
    assert made.selected == {f"tests/gpu/{FILES[0]}::a"}


def test_figures_are_largest_values_and_sums() -> None:
    made = recorder()

    def report(**figures: Any) -> Any:
        return SimpleNamespace(nodeid="x", keywords={}, failed=False, skipped=False, when="call", user_properties=list(figures.items()))

    for figures in ({"max.ratio": 1.0, "count.calls": 20, "host_us": 40}, {"max.ratio": 0.5, "count.calls": 20, "host_us": 30}):
        made.pytest_runtest_logreport(report(**figures))
    assert made.figures == {"max.ratio": 1.0, "count.calls": 40, "host_us": 30}


def test_writing_is_one_step_and_named_by_the_card(tmp_path: Path) -> None:
    path = stamp.write(tmp_path, {"gpu": "NVIDIA H200", "tests": 1})
    assert path == tmp_path / "results/validation/nvidia-h200.json"
    assert json.loads(path.read_text()) == {"gpu": "NVIDIA H200", "tests": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["nvidia-h200.json"]
    assert re.fullmatch(r"[a-z0-9-]+", stamp.slug("NVIDIA H100 80GB HBM3 (rev. A)"))
