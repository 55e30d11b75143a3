"""Judge racecheck's log of triangle multiplication's kernels: fail on any hazard but Triton's hand-over to the warps of a partition.

    sanitize_racecheck.py LOG PRINT_LIMIT

They read from a byte of shared memory which function to run; the default warps write it before, and again at the end. Barriers order all of
it, and racecheck reports it (DESIGN.md, Limits). The accesses carry the line of the kernel's `def` and that of its `gl.warp_specialize`;
`tests/cpu/kernels/test_multiplication_kernels.py` finds no other access to shared memory there.
"""

import ast
import re
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "turbopair/triangle_multiplication"
REPORT = re.compile(r"(?:Error|Warning): Race reported between (.*)")
ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\w+\.py):(\d+)(?: \[\d+ hazards?\])?")
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


def hand_overs() -> set[tuple[str, ...]]:
    """Return (Read or Write, kernel, file, line) of the accesses in question."""
    found = set()
    for path in KERNELS.glob("*_kernels.py"):
        for kernel in ast.parse(path.read_text()).body:
            if not isinstance(kernel, ast.FunctionDef):
                continue
            for node in ast.walk(kernel):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "gl.warp_specialize":
                    places = ("Read", kernel.lineno), ("Write", kernel.lineno), ("Write", node.lineno)
                    found |= {(kind, kernel.name, path.name, str(line)) for kind, line in places}
    return found


def is_hand_over(report: list[str], known: set[tuple[str, ...]]) -> bool:
    """Whether the accesses of a report are a read and writes of one kernel's hand-over."""
    accesses = [match.groups() for match in map(ACCESS.fullmatch, report) if match]
    if len(accesses) < len(report) or not known.issuperset(accesses):
        return False
    return {access[0] for access in accesses} == {"Read", "Write"} and len({access[1:3] for access in accesses}) == 1


def faults(log: str, limit: int) -> tuple[int, list[str]]:
    """Return the number of hazards that are hand-overs, and what else is wrong."""
    reports: list[list[str]] = []
    wrong, totals = [], []
    for line in log.splitlines():
        if not line.startswith("========="):
            continue  # the program's own
        text = line.removeprefix("=========").strip()
        if match := REPORT.fullmatch(text):
            reports.append([match[1]])
        elif text.startswith("and ") and reports:
            reports[-1].append(text.removeprefix("and "))
        elif match := SUMMARY.fullmatch(text):
            totals.append((int(match[1]), int(match[2]) + int(match[3])))
        elif text not in ("", "COMPUTE-SANITIZER"):
            wrong.append(f"not understood: {text}")
    known = hand_overs()
    wrong += [f"hazard: {' / '.join(report)}" for report in reports if not is_hand_over(report, known)]
    if totals != [(len(reports), len(reports))]:
        wrong.append(f"{len(reports)} hazards read, summaries (displayed, errors and warnings): {totals}")
    if len(reports) >= limit:
        wrong.append(f"{limit} hazards, as many as are printed: there may be others")
    return sum(is_hand_over(report, known) for report in reports), wrong


def main(log: str, limit: str) -> None:
    """Print the verdict; exit with 1 if anything is wrong."""
    known, wrong = faults(Path(log).read_text(), int(limit))
    print(f"{known} hazards left out: Triton's hand-over to the warps of a partition, ordered by barriers")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
