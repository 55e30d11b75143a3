"""The README's tables of results are the reference run's, number by number."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = "results/reference/nvidia-h200-2026-11-30"
LENGTHS = (384, 768)
SHOWN = {
    "turbopair.paper": "turbopair `paper` (default)",
    "turbopair.exact": "turbopair `exact`",
    "flex": "FlexAttention (torch.compile)",
    "miniworld_engine": "miniworld-engine 2.3.12 (its Triton kernels)",
    "turbopairformer": "turbopairformer 0.1.3.post1 (published)",
    "trifast": "trifast 0.1.13",
    "cuequivariance": "cuEquivariance 0.13.0",
    "eager": "PyTorch eager (OpenFold3 stock)",
}
STEPS = {
    "turbopair": "turbopair (attention and multiplication)",
    "turbopair_attention": "turbopair, attention only",
    "cuequivariance": "cuEquivariance (both)",
    "flex": "FlexAttention",
    "cuequivariance_attention": "cuEquivariance, attention only",
    "triton": "OpenFold3's Triton",
    "deepspeed": "DeepSpeed DS4Sci",
    "pytorch": "OpenFold3's own PyTorch",
    "lma": "OpenFold3's LMA",
}


def table(name: str) -> list[dict[str, str]]:
    """The rows of one of the reference run's tables."""
    with (ROOT / REFERENCE / f"tables/{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def repeatable() -> dict[str, str]:
    """Cases with bitwise equal gradients by implementation: of the paper's 600."""
    rows = [row for row in table("determinism") if row["inputs"] == "all input cases"]
    return {row["implementation"]: f"{row['bitwise.all']}/{row['cases']}" for row in rows if row["status"] == "ok"}


def kernel_rows() -> list[str]:
    """Triangle attention, from kernel_time.csv (D = 32)."""
    found = {(row["n"], row["implementation"]): row for row in table("kernel_time") if row["head_dim"] == "32"}
    equal = repeatable()
    lines = []
    for n in LENGTHS:
        for name, title in SHOWN.items():
            row = found[str(n), name]
            times = " | ".join(f"{float(row[f'ms.{part}']):.2f}" for part in ("forward", "backward", "both"))
            errors = " | ".join(f"{float(row[f'rmse.{tensor}']):.2e}" for tensor in ("out", "dq", "dk", "dbias"))
            memory = round(float(row["peak_bytes.both"]) / 2**20)
            lines.append(f"| {n} | {title} | {times} | {memory} | {errors} | {equal[name]} |")
    return lines


def step_rows() -> list[str]:
    """OpenFold3's optimizer step on one GPU, from step_time.csv, and whether the paper's 16 GPUs were run."""
    found = {(int(row["crop"]), row["implementation"]): row for row in table("step_time") if row["ranks"] == "1"}
    lines = []
    for name, title in STEPS.items():
        cells = [title]
        for crop in LENGTHS:
            row = found[crop, name]
            if row["status"] == "ok":
                best = float(found[crop, "turbopair"]["s.gpu_busy"])
                cells += [f"{float(row['s.gpu_busy']):.2f}", f"{float(row['s.gpu_busy']) / best:.2f}", f"{float(row['s.wall']):.1f}"]
            else:
                cells += ["not run", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    assert not any(row["ranks"] == "16" and row["status"] == "ok" for row in table("step_time")), "there are numbers of 16 GPUs to show"
    return [*lines, "| each of them on 16 GPUs, two nodes of eight | not run |  |  | not run |  |  |"]


@pytest.mark.parametrize(("block", "rows"), [("results", kernel_rows), ("steps", step_rows)])
def test_the_table_is_that_of_the_reference_run(block: str, rows: Callable[[], list[str]]) -> None:
    text = (ROOT / "README.md").read_text().partition(f"<!-- {block}:begin -->")[2].partition(f"<!-- {block}:end -->")[0]
    shown = [line for line in text.splitlines() if line.startswith("|")]
    assert shown[2:] == rows(), "the README's numbers are not the reference run's; expected:\n" + "\n".join(rows())
    assert f"]({REFERENCE}/" in text
