"""The claims of the TurboPairFormer paper (arXiv 2610.05854, abstract) and what the records of a run say about each.

Every verdict is computed. It is one word, and it never stands without what it rests on: the machine, how many of the
claim's input cases were measured, and whether the run was the CPU emulation, which tests the algorithm and no hardware.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import pandas as pd

from pipeline import summary
from pipeline.provenance import NO_DEVICE
from pipeline.quality_tables import equal_cases, removed_shares
from pipeline.records import Status
from pipeline.summary import CASE, label, on_gpu
from pipeline.table_model import ABSENT, TIMES, Column, Row, Section, Table, Value, to_markdown
from pipeline.table_rows import mean, metric
from pipeline.tensors import SYMBOL

PAPER_SIZES = [(n, d) for n in (384, 640, 768) for d in (16, 32)]
PAPER_CASES = 600
CORRECTED = ("dq", "dk", "dbias")
REMOVED = (0.28, 0.47)
#: Two mean errors closer than this share are level: a draw for the lowest place is still the lowest.
LEVEL = 0.005
STEP_GPUS, STEP_BACKENDS, STEP_CROP = 16, 8, 768
#: Endings that say an implementation cannot do a case; the others (cancelled, lost with its node, not installed, another GPU) say nothing.
DEFEATS = (Status.FAILED, Status.OOM, Status.TIMEOUT)
SPEEDUPS = {"triton": 1.73, "cuequivariance": 1.13}
#: What of the same project computes the attention alone: told beside the claim, which compares it with attention and multiplication.
ATTENTION_ALONE = {"triton": "triton", "cuequivariance": "cuequivariance_attention"}
#: A measured speed-up within this share of the claimed one reproduces it (the claim is given to two decimals and the
#: measurement's own spread is allowed to be 5 %, see the kernel-time table).
SPEEDUP_TOLERANCE = 0.05
CAPTION = (
    "Claims of arXiv 2610.05854 (abstract). Verdicts are computed from the records of this run: reproduced, exceeded, not reproduced, "
    f"not run (why). Errors within {LEVEL:.1%} are level; a speed-up within {SPEEDUP_TOLERANCE:.0%} of the claimed one reproduces it."
)


class Verdict(StrEnum):
    """What the records say of a claim."""

    REPRODUCED = "reproduced"
    EXCEEDED = "exceeded"
    NOT_REPRODUCED = "not reproduced"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Claim:
    """One claim on one machine: the paper's figure, the figure measured, on what, and the verdict with its scope.

    ``scope`` qualifies the verdict (coverage, emulation) or, for ``not run``, is the reason.
    """

    key: str
    statement: str
    paper: str
    measured: str
    device: str
    cases: str
    verdict: Verdict
    scope: str = ""

    @property
    def words(self) -> str:
        """The verdict as printed, its scope in brackets."""
        return f"{self.verdict.value} ({self.scope})" if self.scope else self.verdict.value


def evaluate(data: pd.DataFrame) -> list[Claim]:
    """Every claim, once for each machine in the frame (once without a machine when there are no records)."""
    devices = sorted(set(data["device"])) if len(data) else [NO_DEVICE]
    claims: list[Claim] = []
    for device in devices:
        part = data[data["device"] == device] if len(data) else data
        claims += [
            _residual(part, device),
            _lowest(part, device, "turbopair.paper"),
            _lowest(part, device, "turbopair.exact"),
            _bitwise(part, device),
            _fastest_step(part, device),
            *(_step_speedup(part, device, baseline) for baseline in SPEEDUPS),
        ]
    return claims


def _experiment(data: pd.DataFrame, name: str) -> pd.DataFrame:
    """Its rows; the claims are about attention, or the whole step."""
    return summary.of(data, name)


def _of_turbopair(part: pd.DataFrame) -> pd.Series:
    """Which rows are of this repository's kernels."""
    return part["implementation"].isin([name for name in part["implementation"].unique() if summary.is_turbopair(name)])


def _why_not(part: pd.DataFrame, what: str) -> str:
    """Why there is no number: not planned, or the reasons in the records."""
    return summary.shortfall(part) or f"no {what} in this run" if len(part) else f"no {what} in this run"


def _basis(tried: pd.DataFrame, others: pd.DataFrame) -> tuple[pd.DataFrame, str, bool, pd.DataFrame]:
    """What of ``tried`` a claim about errors rests on: :func:`_chosen` of the rows with numbers, and the defeats that refute it.

    Those are of cases that ``others`` have numbers of, and count even where no row has numbers of their class and sizes. What
    nobody could do is only told: it takes no row's place.
    """
    at_stake, _, judged = _chosen(tried[tried["ok"] | _done_by(others, tried)])
    return *_chosen(tried[tried["ok"]]), at_stake[~at_stake["ok"] & judged]


def _chosen(part: pd.DataFrame) -> tuple[pd.DataFrame, str, bool]:
    """The rows of the class and sizes that a claim about errors is judged on, the class in words, whether the claim has the sizes.

    Inputs from a normal distribution where there are any (the abstract names no others), else the first family. The
    paper's cases where there are any, else its N and D with fewer slices; other sizes are told, not judged: what the
    residual removes grows with N.
    """
    if part.empty:
        return part, "", False
    groups = summary.classes(part)
    keys, rows = next(((k, r) for k, r in groups if k["family"] == "normal" and k["bias_dtype"] == "bf16"), groups[0])
    for chosen in (_in_paper(rows), _lengths_of_paper(rows)):
        if chosen.any():
            return rows[chosen], summary.class_title(keys), True
    return rows, summary.class_title(keys), False


def _lengths_of_paper(rows: pd.DataFrame) -> pd.Series:
    return pd.Series(list(zip(rows["n"], rows["head_dim"], strict=True)), index=rows.index).isin(PAPER_SIZES)


def _in_paper(rows: pd.DataFrame) -> pd.Series:
    return _lengths_of_paper(rows) & (rows["slices"] == rows["n"])


def _coverage(rows: pd.DataFrame) -> tuple[str, str]:
    """(cases measured, in words; qualification of a verdict, empty when all of the paper's cases are there)."""
    cases = rows[CASE].drop_duplicates()
    paper = int(_in_paper(cases).sum())
    others = cases[~_in_paper(cases)]
    if others.empty:
        return f"{paper} of {PAPER_CASES}", "" if paper >= PAPER_CASES else f"on {paper} of {PAPER_CASES} cases"
    sizes = _sizes_in_words(others)
    more = _count(len(others), "other")
    basis = f"{paper} of {PAPER_CASES} cases and {more}" if paper else f"{_count(len(others), 'case')}, none of the paper's {PAPER_CASES}"
    return f"{paper} of {PAPER_CASES}; {more}", f"on {basis}: {sizes}"


def _sizes_in_words(cases: pd.DataFrame) -> str:
    pairs = sorted({(int(n), int(i)) for n, i in zip(cases["n"], cases["slices"], strict=True)})
    return ", ".join(f"N = {n}" + (f" with {i} slices" if i != n else "") for n, i in pairs)


def _other_sizes(cases: pd.DataFrame) -> str:
    """Why a claim is not judged on cases of sizes that it does not speak of."""
    return f"none of the claim's sizes, only {_sizes_in_words(cases)}"


def _scope(device: str, *parts: str) -> str:
    return "; ".join(filter(None, ["" if on_gpu(device) else "CPU emulation", *parts]))


def _tried(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that have numbers, or a defeat; what was not run says nothing."""
    return rows[rows["ok"] | _defeats(rows)]


def _defeats(rows: pd.DataFrame) -> pd.Series:
    """Which rows say that an implementation could not do the case; a damaged record says nothing of it."""
    return rows["status"].isin(DEFEATS) & ~rows["damaged"].astype(bool)


def _done_by(others: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """Which ``rows`` are of cases that ``others`` have numbers of."""
    done = pd.MultiIndex.from_frame(others.loc[others["ok"], CASE])
    return pd.Series(pd.MultiIndex.from_frame(rows[CASE]).isin(done), index=rows.index)


def _only(who: str, beaten: pd.DataFrame) -> str:
    """How many cases only somebody else could do, in words; empty if none."""
    return f"{_count(summary.case_count(beaten), 'case')} that only {who} could do" if len(beaten) else ""


def _unmeasured(part: pd.DataFrame, what: str, device: str, beaten: str) -> tuple[Verdict, str]:
    """The verdict where no case has numbers, and its scope: cases that only others could do refute a claim all the same."""
    scope = _scope(device, beaten, summary.shortfall(part) or "")
    return (Verdict.NOT_REPRODUCED, scope) if beaten else (Verdict.NOT_RUN, _why_not(part, what))


def _residual(data: pd.DataFrame, device: str) -> Claim:
    statement = "The output residual cuts the RMSE of dQ, dK and dBias: turbopair (paper) against turbopair (plain)"
    paper = "by 28 to 47 %"
    part = _experiment(data, "ablation")
    part = part[part["implementation"].isin(["turbopair.plain", "turbopair.paper"])]
    plain = part[part["ok"] & (part["implementation"] == "turbopair.plain")]
    tried = _tried(part[part["implementation"] == "turbopair.paper"])
    basis, of_class, judged, lost = _basis(tried[_done_by(plain, tried)], plain)
    beaten, failed = _only(label("turbopair.plain"), lost), summary.shortfall(part) or ""
    if basis.empty:
        return Claim("residual", statement, paper, ABSENT, device, "0", *_unmeasured(part, "ablation", device, beaten))
    paired = removed_shares(part)
    rows = paired[paired["cell_id"].isin(basis["cell_id"])]
    cases, coverage = _coverage(rows)
    shares = {t: float(rows[f"removed.{t}"].mean()) for t in CORRECTED}
    measured = ", ".join(f"{SYMBOL[t]} {100 * s:.1f} %" for t, s in shares.items()) + f" ({of_class})"
    others = [
        f"{keys['family']} {100 * min(means):.0f} to {100 * max(means):.0f} %"
        for keys, group in summary.classes(paired)
        if summary.class_title(keys) != of_class and (means := [float(group[f"removed.{t}"].mean()) for t in CORRECTED])
    ]
    measured += "; other inputs: " + ", ".join(others) if others else ""
    # Compared as printed, in whole per cent like the claim.
    rounded = [round(s, 2) for s in shares.values()]
    if not judged and not beaten:
        verdict, coverage = Verdict.NOT_RUN, _other_sizes(rows)
    elif beaten or any(math.isnan(s) for s in rounded) or min(rounded) < REMOVED[0]:
        verdict = Verdict.NOT_REPRODUCED
    else:
        verdict = Verdict.EXCEEDED if max(rounded) > REMOVED[1] else Verdict.REPRODUCED
    return Claim("residual", statement, paper, measured, device, cases, verdict, _scope(device, coverage, beaten, failed))


def _lowest(data: pd.DataFrame, device: str, own: str) -> Claim:
    key = f"lowest_rmse.{own.removeprefix('turbopair.')}"
    statement = f"Lowest mean RMSE of dQ, dK and dBias among the implementations compared: {label(own)}"
    paper = "lowest of all three"
    part = _experiment(data, "accuracy")
    mine, done = part[part["implementation"] == own], part[part["ok"] & ~_of_turbopair(part)]
    rows, of_class, judged, lost = _basis(_tried(mine), done)
    beaten, failed = _only("others", lost), summary.shortfall(mine) or ""
    if rows.empty:
        return Claim(key, statement, paper, ABSENT, device, "0", *_unmeasured(mine, f"accuracy of {label(own)}", device, beaten))
    cases, coverage = _coverage(rows)
    shared = rows[CASE].drop_duplicates()
    others = {str(name): group.merge(shared, on=CASE) for name, group in done.groupby("implementation", sort=True)}
    peers = {name: same for name, same in others.items() if len(same) == len(shared)}
    # A peer that lost a case is not out of it: on those that it has, it can contradict the claim, though not confirm it alone.
    partial = {name: same for name, same in others.items() if 0 < len(same) < len(shared)}
    errors = {name: _errors(rows, same) for name, same in (peers | partial).items()}
    above = [name for name in partial if any(_relation(*pair) == "above" for pair in errors[name].values())]
    texts, unknown, contradicted = [], [], bool(above)
    for t in CORRECTED if peers else ():
        compared = {name: errors[name][t] for name in peers if t in errors[name]}
        if not compared:
            unknown.append(SYMBOL[t])
            continue
        best = min(compared, key=lambda name: compared[name][1])
        value, error = compared[best]
        relation = _relation(value, error)
        texts.append(f"{SYMBOL[t]} {value:.2e}, {relation} {label(best)} {error:.2e}")
        contradicted |= relation == "above"
    scope = [coverage, *(f"above {label(n)} on the {_count(len(partial[n]), 'case')} that it has" for n in above), beaten]
    without = f"no comparable RMSE of {' and '.join(unknown)}" if unknown else ""
    if beaten or (contradicted and judged):
        verdict, scope = Verdict.NOT_REPRODUCED, [*scope, without]
    elif not judged:
        verdict, scope = Verdict.NOT_RUN, [_other_sizes(rows)]
    elif without or not peers:
        verdict, scope = Verdict.NOT_RUN, [without or "no other implementation measured on the same cases"]
    else:
        verdict = Verdict.REPRODUCED
    measured = "; ".join(texts or [ABSENT]) + f" ({of_class}, {_count(len(peers), 'other')} compared)"
    apart = [label(name) for name in errors if "dbias" not in errors[name]]
    measured += f"; dBias of another type, so not compared: {', '.join(sorted(apart))}" if apart else ""
    fewer = [f"{label(name)} on {len(same)}{_above_in_words(errors[name])}" for name, same in partial.items()]
    measured += f"; fewer cases: {', '.join(fewer)}" if fewer else ""
    none = [label(name) for name, same in others.items() if same.empty]
    measured += f"; none of these cases: {', '.join(none)}" if none else ""
    return Claim(key, statement, paper, measured, device, cases, verdict, _scope(device, *scope, failed))


def _errors(own: pd.DataFrame, peer: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Mean errors of both over exactly the cases that ``peer`` has, by tensor; dBias only where both give it in one type."""
    own = own.merge(peer[CASE].drop_duplicates(), on=CASE)
    tensors = [t for t in CORRECTED if t != "dbias" or _dtypes(peer) == _dtypes(own)]
    means = {t: (mean(own, f"rmse.{t}"), mean(peer, f"rmse.{t}")) for t in tensors}
    return {t: pair for t, pair in means.items() if not any(map(math.isnan, pair))}


def _relation(value: float, error: float) -> str:
    """How an own error stands to a peer's."""
    return "level with" if abs(value - error) <= LEVEL * error else "below" if value < error else "above"


def _above_in_words(errors: dict[str, tuple[float, float]]) -> str:
    """The errors that are above a peer's, in brackets; empty if none is."""
    found = [f"{SYMBOL[t]} {a:.2e}, above {b:.2e}" for t, (a, b) in errors.items() if _relation(a, b) == "above"]
    return f" ({'; '.join(found)})" if found else ""


def _count(number: int, unit: str) -> str:
    """ "1 case", "2 cases"."""
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _dtypes(rows: pd.DataFrame) -> set[str]:
    return set(rows["dtype.dbias"].dropna()) if "dtype.dbias" in rows else set()


def _bitwise(data: pd.DataFrame, device: str) -> Claim:
    statement = "dQ, dK, dV and dBias are bitwise equal over 5 calls in every case (every turbopair precision that was run)"
    paper = "600/600 cases"
    everything = _experiment(data, "determinism")
    part = everything[_of_turbopair(everything)]
    tried, failed = _tried(part), summary.shortfall(part) or ""
    done, lost = tried[tried["ok"]], tried[~tried["ok"] & _lengths_of_paper(tried)]
    beaten = _only("others", lost[_done_by(everything, lost)]) if on_gpu(device) else ""
    if done.empty:
        return Claim("bitwise", statement, paper, ABSENT, device, "0", *_unmeasured(part, "determinism of turbopair", device, beaten))
    counts = {str(name): (equal_cases(group), len(group)) for name, group in done.groupby("implementation", sort=True)}
    calls = int(metric(done, "calls").min()) if len(metric(done, "calls")) else 0
    measured = ", ".join(f"{label(name)} {equal}/{total}" for name, (equal, total) in counts.items()) + f", {calls} calls"
    # The scope is that of the precision with the fewest cases.
    fewest = min(counts, key=lambda name: int(_in_paper(done[done["implementation"] == name]).sum()))
    cases, coverage = _coverage(done[done["implementation"] == fewest])
    if beaten or any(equal < total for equal, total in counts.values()):  # in every case, it says
        scope = _scope(device, coverage, beaten, failed)
        return Claim("bitwise", statement, paper, measured, device, cases, Verdict.NOT_REPRODUCED, scope)
    if not on_gpu(device):
        return Claim("bitwise", statement, paper, measured, device, cases, Verdict.NOT_RUN, "no GPU; the figures are the CPU emulation's")
    if calls < 5:
        return Claim("bitwise", statement, paper, measured, device, cases, Verdict.NOT_RUN, f"only {calls} calls a case, the claim has 5")
    if not _lengths_of_paper(done).any():
        return Claim("bitwise", statement, paper, measured, device, cases, Verdict.NOT_RUN, _other_sizes(done))
    return Claim("bitwise", statement, paper, measured, device, cases, Verdict.REPRODUCED, _scope(device, coverage, failed))


def _step_rows(data: pd.DataFrame, crop: int | None = None) -> tuple[pd.DataFrame, int]:
    """The step-time rows on the paper's number of GPUs, else on the number with most measured (at ``crop``), and that number."""
    part = _experiment(data, "step_time")
    done = part[part["ok"]] if len(part) else part
    if done.empty:
        return part, 0
    weighed = done if crop is None or not (done["n"] == crop).any() else done[done["n"] == crop]
    counts = weighed["ranks"].value_counts()
    ranks = max(counts.index, key=lambda number: (number == STEP_GPUS, counts[number], number))
    return done[done["ranks"] == ranks], int(ranks)


def _fastest_step(data: pd.DataFrame, device: str) -> Claim:
    statement = "OpenFold3's optimizer step takes the least GPU time of all back ends, at every crop"
    paper = "lowest of 8 on 16 H100"
    rows, ranks = _step_rows(data)
    if not on_gpu(device) or not ranks:
        why = "no GPU" if not on_gpu(device) else _why_not(rows, "step time")
        return Claim("step_lowest", statement, paper, ABSENT, device, "0", Verdict.NOT_RUN, why)
    texts, won, kinds, without = [], [], set(), []
    planned = _experiment(data, "step_time")
    planned = planned[planned["ranks"] == ranks]
    for crop, group in planned.groupby("n", sort=True):
        seconds, kind = _seconds(group)
        own = {name: s for name, s in seconds.items() if name in summary.OWN_BACKENDS}
        others = {name: s for name, s in seconds.items() if name not in own}
        mine, best = (min(times, key=times.__getitem__, default="") for times in (own, others))
        tried = group[group["implementation"].isin(summary.OWN_BACKENDS)]
        if len(tried) and not own:
            without.append(f"no time of turbopair at crop {crop}: {summary.shortfall(tried)}")
        # Where turbopair failed and another did not, it is not the fastest; where it was not run, nothing is known.
        if others and (own or _defeats(tried).any()):
            texts.append(f"crop {crop}: " + (f"{label(mine)} {own[mine]:.3g} s" if own else f"turbopair {ABSENT}"))
            texts[-1] += f", {label(best)} {others[best]:.3g} s"
            won.append(bool(own) and own[mine] < others[best])
            kinds.add(kind)
    if not won:
        why = "; ".join(["turbopair and another back end not both measured", *without])
        return Claim("step_lowest", statement, paper, ABSENT, device, "0", Verdict.NOT_RUN, why)
    verdict = Verdict.REPRODUCED if all(won) else Verdict.NOT_REPRODUCED
    backends = rows["implementation"].nunique()
    scope = _step_scope(device, ranks, kinds, _count(backends, "back end") if backends < STEP_BACKENDS else "", *without)
    return Claim("step_lowest", statement, paper, "; ".join(texts), device, _count(len(won), "crop"), verdict, scope)


def _seconds(rows: pd.DataFrame) -> tuple[dict[str, float], str]:
    """(seconds a step by back end, what they are): GPU busy time where every row with a time has it, else wall time of all.

    Never one kind for one and the other for another: they are not comparable.
    """
    done = rows[rows["ok"]]
    kind, name = ("GPU busy", "s.gpu_busy") if "s.gpu_busy" in done and done["s.gpu_busy"].notna().all() else ("wall", "s.wall")
    means = {str(backend): mean(one, name) for backend, one in done.groupby("implementation", sort=True)}
    return {backend: seconds for backend, seconds in means.items() if not math.isnan(seconds)}, kind


def _step_scope(device: str, ranks: int, kinds: set[str], backends: str = "", *more: str) -> str:
    wall = "wall time, not GPU time" + ("" if kinds == {"wall"} else ", at some crops")
    parts = [backends, "" if ranks == STEP_GPUS else f"{summary.count_of_processors(device, ranks)}, not {STEP_GPUS}"]
    parts += ["" if "H100" in device else f"on {device}, not H100", "" if kinds == {"GPU busy"} else wall]
    return "; ".join(filter(None, [*parts, *more]))


def _step_speedup(data: pd.DataFrame, device: str, baseline: str) -> Claim:
    claimed = SPEEDUPS[baseline]
    key, statement = f"step_speedup.{baseline}", f"Optimizer step at crop {STEP_CROP}: speed-up over {label(baseline)}"
    paper = f"{claimed:.2f}{TIMES} on 16 H100"
    rows, ranks = _step_rows(data, STEP_CROP)
    if not on_gpu(device) or not ranks:
        why = "no GPU" if not on_gpu(device) else _why_not(rows, "step time")
        return Claim(key, statement, paper, ABSENT, device, "0", Verdict.NOT_RUN, why)
    at_crop = rows[rows["n"] == STEP_CROP]
    compared = _speedup(at_crop, baseline, "turbopair")
    if compared is None:
        absent = [name for name in (baseline, "turbopair") if not (at_crop["implementation"] == name).any()]
        why = f"no step time of {' or '.join(map(label, absent)) or 'one kind for both'} at crop {STEP_CROP}"
        planned = _experiment(data, "step_time")
        missing = planned[(planned["ranks"] == ranks) & (planned["n"] == STEP_CROP) & planned["implementation"].isin(absent)]
        why += f": {reason}" if (reason := summary.shortfall(missing)) else ""
        seconds, kind = _seconds(at_crop[at_crop["implementation"] == baseline])
        if not seconds or absent != ["turbopair"] or not _defeats(missing).any():
            return Claim(key, statement, paper, ABSENT, device, "0", Verdict.NOT_RUN, why)
        measured = f"turbopair {ABSENT}, {label(baseline)} {seconds[baseline]:.3g} s"
        return Claim(key, statement, paper, measured, device, "1 crop", Verdict.NOT_REPRODUCED, _step_scope(device, ranks, {kind}, why))
    ratio, measured, kind = compared
    if ratio > claimed * (1 + SPEEDUP_TOLERANCE):
        verdict = Verdict.EXCEEDED
    else:
        verdict = Verdict.REPRODUCED if ratio >= claimed * (1 - SPEEDUP_TOLERANCE) else Verdict.NOT_REPRODUCED
    peer = ATTENTION_ALONE[baseline]
    if alone := _speedup(at_crop, peer, "turbopair_attention"):
        measured += f"; {label('turbopair_attention')} against {label(peer)}: {alone[1]}"
    return Claim(key, statement, paper, measured, device, "1 crop", verdict, _step_scope(device, ranks, {kind}))


def _speedup(rows: pd.DataFrame, baseline: str, own: str) -> tuple[float, str, str] | None:
    """(speed-up of one back end over another, in words with its seconds, their kind, the same for both); None without both."""
    seconds, kind = _seconds(rows[rows["implementation"].isin([baseline, own])])
    a, b = seconds.get(baseline, 0.0), seconds.get(own, 0.0)
    if not a or not b:
        return None
    return a / b, f"{a / b:.2f}{TIMES} ({a:.3g} s against {b:.3g} s{', wall time' if kind == 'wall' else ''})", kind


def to_table(claims: Sequence[Claim], footnotes: Sequence[str]) -> Table:
    """The claims as a table."""
    columns = [Column(k, k, numeric=False) for k in ("claim", "paper", "verdict", "measured", "on", "cases")]
    texts = [(c.statement, c.paper, c.words, c.measured, c.device, c.cases) for c in claims]
    rows = [Row({column.key: Value(t) for column, t in zip(columns, line, strict=True)}) for line in texts]
    return Table("claims", "Claims of the paper", CAPTION, [Section("Verdicts", columns, rows, {})], list(footnotes))


def markdown_text(claims: Sequence[Claim], footnotes: Sequence[str]) -> str:
    """``claims.md``: a short table of verdicts, then what was measured for each, so that it reads in a terminal."""
    table = to_table(claims, footnotes)
    section = table.sections[0]
    section.columns = [c for c in section.columns if c.key not in ("measured",)]
    lines = [f"- **{c.statement}** [{c.device}]: {c.measured}. Paper: {c.paper}. Verdict: {c.words}." for c in claims]
    text = to_markdown(table)
    marker = text.index("\n- ") if footnotes else len(text)
    return text[:marker].rstrip() + "\n\n## What was measured\n\n" + "\n".join(lines) + "\n\n## Provenance\n" + text[marker:]
