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


def recorder(selected: str, **states: str) -> stamp.StampRecorder:
    """A recorder after a session: names of tests separated by spaces."""
    made = stamp.StampRecorder(SimpleNamespace(args=[]))  # type: ignore[arg-type]
    made.selected = set(selected.split())
    for state, names in states.items():
        setattr(made, state, set(names.split()))
    return made


@pytest.mark.parametrize(
    "states,reason",
    [
        ({"passed": "a b"}, None),
        ({"passed": "a", "skipped": "b", "may_skip": "b"}, None),
        ({"passed": "a", "failed": "b"}, "1 tests failed"),
        ({"passed": "a b", "failed": "b"}, "1 tests failed"),
        ({"passed": "a", "skipped": "b"}, "1 tests were skipped, such as b"),
        ({"passed": "a"}, "1 tests did not run"),
    ],
)
def test_only_a_whole_passing_run_validates(states: dict[str, str], reason: str | None) -> None:
    assert recorder("a b", **states).refusal() == reason


def test_a_part_of_the_suite_does_not_validate() -> None:
    made = recorder("a", passed="a")
    inside = SimpleNamespace(path=stamp.SUITE / "test_shapes.py", nodeid="x", get_closest_marker=lambda name: None)
    made.pytest_deselected([SimpleNamespace(path=ROOT / "tests/cpu/test_x.py")])  # type: ignore[list-item]
    assert made.refusal() is None
    made.pytest_deselected([inside])  # type: ignore[list-item]
    assert made.refusal() == "only part of the GPU suite was selected"
    files = sorted(stamp.SUITE.glob("test_*.py"))
    for chosen, arguments, partial in ((files, ["tests/gpu"], False), (files[1:], ["tests/gpu"], True), (files, ["tests/gpu::x"], True)):
        made = stamp.StampRecorder(SimpleNamespace(args=arguments))  # type: ignore[arg-type]
        items = [SimpleNamespace(path=path, nodeid=path.name, get_closest_marker=lambda name: None) for path in chosen]
        made.pytest_collection_finish(SimpleNamespace(items=items))  # type: ignore[arg-type]
        assert made.deselected is partial


def test_figures_are_largest_values_and_sums() -> None:
    made = recorder("")

    def report(**figures: Any) -> Any:
        return SimpleNamespace(nodeid="x", failed=False, skipped=False, when="call", user_properties=list(figures.items()))

    for figures in ({"max.ratio": 1.0, "count.calls": 20, "host_us": 40}, {"max.ratio": 0.5, "count.calls": 20, "host_us": 30}):
        made.pytest_runtest_logreport(report(**figures))
    assert made.figures == {"max.ratio": 1.0, "count.calls": 40, "host_us": 30}


def test_writing_is_one_step_and_named_by_the_card(tmp_path: Path) -> None:
    path = stamp.write(tmp_path, {"gpu": "NVIDIA H200", "tests": 1})
    assert path == tmp_path / "results/validation/nvidia-h200.json"
    assert json.loads(path.read_text()) == {"gpu": "NVIDIA H200", "tests": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["nvidia-h200.json"]
    assert re.fullmatch(r"[a-z0-9-]+", stamp.slug("NVIDIA H100 80GB HBM3 (rev. A)"))
