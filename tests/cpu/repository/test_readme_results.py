"""The README's table of results is the reference run's, number by number."""

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = "results/reference/nvidia-h200-2026-11-30"
LENGTHS = (384, 768)
SHOWN = {
    "turbopair.paper": "turbopair `paper` (default)",
    "turbopair.exact": "turbopair `exact`",
    "flex": "FlexAttention (torch.compile)",
    "cuequivariance": "cuEquivariance 0.13.0",
    "eager": "PyTorch eager (OpenFold3 stock)",
}


def rows() -> list[str]:
    """The body of the table, from the reference run's kernel_time.csv (D = 32)."""
    with (ROOT / REFERENCE / "tables/kernel_time.csv").open(newline="") as file:
        found = {(row["n"], row["implementation"]): row for row in csv.DictReader(file) if row["head_dim"] == "32"}
    lines = []
    for n in LENGTHS:
        for name, title in SHOWN.items():
            row = found[str(n), name]
            times = " | ".join(f"{float(row[f'ms.{part}']):.2f}" for part in ("forward", "backward", "both"))
            errors = " | ".join(f"{float(row[f'rmse.{tensor}']):.2e}" for tensor in ("dq", "dk", "dbias"))
            memory = round(float(row["peak_bytes.both"]) / 2**20)
            lines.append(f"| {n} | {title} | {times} | {memory} | {errors} | {row['bitwise'] or 'not run'} |")
    return lines


def test_the_table_is_that_of_the_reference_run() -> None:
    text = (ROOT / "README.md").read_text()
    block = text.partition("<!-- results:begin -->")[2].partition("<!-- results:end -->")[0]
    table = [line for line in block.splitlines() if line.startswith("|")]
    assert table[2:] == rows(), "the README's numbers are not the reference run's; expected:\n" + "\n".join(rows())
    assert f"]({REFERENCE}/" in block
