import pytest
import synthetic as syn

from pipeline import claims, summary
from pipeline.claims import Verdict
from pipeline.records import Status


def claim(records, key, planned=()):
    found = [c for c in claims.evaluate(summary.frame(records, planned)) if c.key == key]
    assert len(found) == 1
    return found[0]


def ablation(plain, paper, n=384, seeds=(0,), environment=syn.H200, family="normal"):
    return [
        syn.record(syn.cell("ablation", f"turbopair.{name}", n, seed=s, family=family), syn.errors(ratios), environment=environment)
        for name, ratios in (("plain", plain), ("paper", paper))
        for s in seeds
    ]


def all_cases():
    return [(n, d, s) for n in (384, 640, 768) for d in (16, 32) for s in range(100)]


# --- the residual ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paper", "verdict"),
    [
        ((0.72, 0.53, 1.0, 0.6), Verdict.REPRODUCED),  # 28, 47, 40 %
        ((0.72, 0.40, 1.0, 0.6), Verdict.EXCEEDED),  # dK 60 %
        ((0.80, 0.40, 1.0, 0.6), Verdict.NOT_REPRODUCED),  # dQ 20 %, although dK is above the range
        ((1.20, 1.20, 1.0, 1.2), Verdict.NOT_REPRODUCED),  # it adds error
    ],
)  # fmt: skip
def test_residual(paper, verdict):
    found = claim(ablation((1.0,) * 4, paper), "residual")
    assert found.verdict is verdict
    assert found.scope == "on 1 of 600 cases"  # never the bare word on a part of the cases


def test_full_coverage_needs_no_qualification():
    records = [
        syn.record(syn.cell("ablation", f"turbopair.{name}", n, d, seed=s), syn.errors(ratios))
        for n, d, s in all_cases()
        for name, ratios in (("plain", (1.0,) * 4), ("paper", (0.6,) * 4))
    ]
    found = claim(records, "residual")
    assert (found.words, found.cases) == ("reproduced", "600 of 600")


def test_emulation_and_fewer_slices_are_said():
    records = [
        syn.record(syn.cell("ablation", f"turbopair.{name}", 384, slices=8), syn.errors(ratios), environment=syn.CPU)
        for name, ratios in (("plain", (1.0,) * 4), ("paper", (0.6,) * 4))
    ]
    found = claim(records, "residual")
    assert found.words == "reproduced (CPU emulation; on 1 case, none of the paper's 600: N = 384 with 8 slices)"
    assert found.device == "CPU (Some Laptop CPU)"


@pytest.mark.parametrize("paper", [0.6, 0.98])
def test_other_sizes_neither_reproduce_nor_refute(paper):
    found = claim(ablation((1.0,) * 4, (paper,) * 4, n=64), "residual")
    assert found.words == "not run (none of the claim's sizes, only N = 64)"
    assert f"dQ {100 * (1 - paper):.1f} %" in found.measured


def test_other_sizes_of_the_other_claims():
    records = [syn.record(syn.cell("accuracy", who, 64), syn.errors((1.0,) * 4)) for who in ("turbopair.paper", "sdpa")]
    assert claim(records, "lowest_rmse.paper").scope.startswith("none of the claim's sizes")
    assert claim([syn.determinism("turbopair.exact", 64)], "bitwise").scope.startswith("none of the claim's sizes")
    differing = syn.determinism("turbopair.exact", 64, differing=("dq",))
    assert claim([differing], "bitwise").verdict is Verdict.NOT_REPRODUCED  # one difference at any size is one too many


def test_the_papers_sizes_are_judged_where_they_exist():
    records = ablation((1.0,) * 4, (0.6,) * 4, n=384) + ablation((1.0,) * 4, (0.99,) * 4, n=64)
    assert claim(records, "residual").verdict is Verdict.REPRODUCED


def test_other_families_are_told_but_not_judged():
    found = claim(ablation((1.0,) * 4, (0.6,) * 4) + ablation((1.0,) * 4, (0.9,) * 4, family="peaked"), "residual")
    assert found.verdict is Verdict.REPRODUCED and "peaked 10 to 10 %" in found.measured


@pytest.mark.parametrize("done", [1, 0])
def test_cases_that_only_the_plain_form_could_do_refute_the_residual(done):
    records = ablation((1.0,) * 4, (0.6,) * 4, seeds=range(5))
    lost = [syn.record(r.cell, None, Status.FAILED, "boom") for r in records if r.cell.implementation == "turbopair.paper"]
    found = claim([*records[: 5 + done], *lost[done:]], "residual")
    told = {1: "on 1 of 600 cases; 4 cases", 0: "5 cases"}[done]
    assert found.words == f"not reproduced ({told} that only turbopair (plain) could do; {5 - done} of 10 failed: boom)"
    assert ("dQ 40.0 %" in found.measured) == bool(done)


def test_cases_of_the_residual_that_were_not_run_are_told():
    records = ablation((1.0,) * 4, (0.6,) * 4, seeds=range(5))
    found = claim(records[:6], "residual", [r.cell for r in records])
    assert found.words == "reproduced (on 1 of 600 cases; 4 of 10 not run: no record yet)"


ONLY_PLAIN = "1 case that only turbopair (plain) could do; 1 of 4 failed: boom"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"n": 64}, "on 1 case, none of the paper's 600: N = 64"),
        ({"slices": 8}, "on 1 case, none of the paper's 600: N = 384 with 8 slices"),
        ({"family": "offset"}, "on 1 of 600 cases"),
    ],
)
def test_a_case_of_the_claim_that_only_the_plain_form_could_do_decides_although_other_cases_have_numbers(other, told):
    """Those are told; where the plain form could not do it either, it decides nothing."""
    plain = ablation((1.0,) * 4, (1.0,) * 4)[0]
    lost = syn.record(syn.cell("ablation", "turbopair.paper"), None, Status.FAILED, "boom")
    measured = [
        syn.record(syn.cell("ablation", f"turbopair.{name}", **{"n": 384, **other}), syn.errors((value,) * 4))
        for name, value in (("plain", 1.0), ("paper", 0.6))
    ]
    found = claim([plain, lost, *measured], "residual")
    assert found.words == f"not reproduced ({told}; {ONLY_PLAIN})" and found.measured.startswith("dQ 40.0 %")
    nobody = claim([lost.model_copy(update={"cell": plain.cell, "cell_id": plain.cell_id}), lost, *measured], "residual")
    assert nobody.verdict is (Verdict.NOT_RUN if "n" in other else Verdict.REPRODUCED) and "2 of 4 failed: boom" in nobody.scope


def test_residual_not_run_says_why():
    failed = [syn.record(syn.cell("ablation", "turbopair.paper"), None, Status.FAILED, "illegal instruction")]
    assert claim(failed, "residual").words == "not run (failed: illegal instruction)"
    assert claim([syn.accuracy("sdpa")], "residual").words == "not run (no ablation in this run)"


# --- lowest error ----------------------------------------------------------------------------------------------------


def accuracies(own, peers, name="turbopair.paper", seeds=(0, 1), **more):
    return [
        syn.record(syn.cell("accuracy", who, seed=s), syn.errors(ratios, **more))
        for who, ratios in {name: own, **peers}.items()
        for s in seeds
    ]


@pytest.mark.parametrize(
    ("own", "verdict", "word"),
    [
        ((1.0, 1.0, 9.0, 1.0), Verdict.REPRODUCED, "below"),  # dV is not part of the claim
        ((1.2, 1.0, 1.0, 1.0), Verdict.REPRODUCED, "level with"),
        ((1.3, 1.0, 1.0, 1.0), Verdict.NOT_REPRODUCED, "above"),
    ],
)  # fmt: skip
def test_lowest(own, verdict, word):
    found = claim(accuracies(own, {"flex": (1.2, 1.2, 1.0, 1.2), "sdpa": (1.5,) * 4}), "lowest_rmse.paper")
    assert found.verdict is verdict and f"{word} FlexAttention" in found.measured
    assert found.scope == "on 2 of 600 cases"


def test_each_precision_is_judged_by_itself():
    records = accuracies((1.3,) * 4, {"flex": (1.0,) * 4, "turbopair.exact": (0.9,) * 4})
    assert claim(records, "lowest_rmse.paper").verdict is Verdict.NOT_REPRODUCED
    assert claim(records, "lowest_rmse.exact").verdict is Verdict.REPRODUCED


def lost(name, seed=0, n=384, **more):
    return syn.record(syn.cell("accuracy", name, n, seed=seed, **more), None, Status.OOM, "out of GPU memory")


def test_a_case_that_turbopair_failed_and_another_did_is_not_lowest():
    records = accuracies((1.0,) * 4, {"sdpa": (1.5,) * 4})
    found = claim([lost("turbopair.paper"), *records[1:]], "lowest_rmse.paper")
    assert found.words == "not reproduced (on 1 of 600 cases; 1 case that only others could do; 1 of 2 oom: out of GPU memory)"
    assert "below PyTorch SDPA" in found.measured
    # what no other did decides nothing, nor what was not run; both are told
    found = claim([lost("turbopair.paper"), records[1], lost("sdpa"), records[3]], "lowest_rmse.paper")
    assert found.words == "reproduced (on 1 of 600 cases; 1 of 2 oom: out of GPU memory)"
    found = claim(records[1:], "lowest_rmse.paper", [records[0].cell])
    assert found.words == "reproduced (on 1 of 600 cases; 1 of 2 not run: no record yet)"


def test_lowest_without_any_own_case():
    own, peer = [lost("turbopair.paper", s) for s in (0, 1)], accuracies((1.0,) * 4, {"sdpa": (1.5,) * 4})[2:]
    assert claim(own, "lowest_rmse.paper").words == "not run (oom: out of GPU memory)"
    assert claim([*own, *peer], "lowest_rmse.paper").words == "not reproduced (2 cases that only others could do; oom: out of GPU memory)"
    assert claim([own[0], *peer[1:]], "lowest_rmse.paper").words == "not run (oom: out of GPU memory)"


def test_a_peer_without_all_cases_is_compared_on_those_that_it_has():
    """Lower there, it contradicts the claim; what it lost takes nothing from that."""
    own = [syn.record(syn.cell("accuracy", "turbopair.paper", seed=s), syn.errors((r,) * 4)) for s, r in ((0, 0.1), (1, 1.2), (2, 1.2))]
    records = [*own, *accuracies((1.2,) * 4, {"sdpa": (1.5,) * 4}, seeds=(0, 1, 2))[3:]]
    flex = [syn.record(syn.cell("accuracy", "flex", seed=s), syn.errors((1.3, 1.0, 1.0, 1.3))) for s in (1, 2)]
    found = claim([*records, lost("flex"), *flex], "lowest_rmse.paper")
    # its 1.0 is above the mean of all three cases of turbopair, and below that of the two
    assert found.words == "not reproduced (on 3 of 600 cases; above FlexAttention (torch.compile) on the 2 cases that it has)"
    assert found.measured.endswith("fewer cases: FlexAttention (torch.compile) on 2 (dK 3.00e-04, above 2.50e-04)")


def test_peers_compared_on_fewer_cases_are_named():
    records = accuracies((1.0,) * 4, {"sdpa": (1.5,) * 4}, seeds=(0, 1, 2))
    records += [syn.record(syn.cell("accuracy", "flex", seed=s), syn.errors((1.2,) * 4)) for s in (0, 1)]
    records += [syn.record(syn.cell("accuracy", "trifast"), syn.errors((0.996,) * 4)), lost("trifast", 1), lost("flex", 2)]
    found = claim([*records, syn.accuracy("eager", 640)], "lowest_rmse.paper")
    assert found.words == "reproduced (on 3 of 600 cases)"
    assert "1 others compared" not in found.measured and "(normal inputs, bf16, 1 other compared)" in found.measured
    assert "; fewer cases: FlexAttention (torch.compile) on 2, trifast on 1" in found.measured
    assert found.measured.endswith("; none of these cases: PyTorch eager (OpenFold3 stock)")


def test_a_bias_gradient_of_another_type_is_not_compared_on_fewer_cases_either():
    records = accuracies((1.0,) * 4, {"sdpa": (1.5,) * 4})
    records += [syn.record(syn.cell("accuracy", "cuequivariance"), syn.errors((1, 1, 1, 0.2), dtype="float32")), lost("cuequivariance", 1)]
    found = claim(records, "lowest_rmse.paper")
    assert found.verdict is Verdict.REPRODUCED and "dBias of another type, so not compared: cuEquivariance" in found.measured
    assert found.measured.endswith("fewer cases: cuEquivariance on 1")


def test_peers_with_fewer_cases_alone_contradict_and_do_not_confirm():
    own, flex = accuracies((1.0,) * 4, {}), syn.cell("accuracy", "flex")
    worse = claim([*own, syn.record(flex, syn.errors((1.2,) * 4))], "lowest_rmse.paper")
    assert worse.words == "not run (no other implementation measured on the same cases)"
    better = claim([*own, syn.record(flex, syn.errors((0.8,) * 4))], "lowest_rmse.paper")
    assert better.words == "not reproduced (on 2 of 600 cases; above FlexAttention (torch.compile) on the 1 case that it has)"


def test_a_peer_with_fewer_cases_is_not_judged_at_other_sizes():
    records = [
        syn.record(syn.cell("accuracy", who, 64, seed=s), syn.errors((1.0,) * 4)) for who in ("turbopair.paper", "sdpa") for s in (0, 1)
    ]
    found = claim([*records, syn.record(syn.cell("accuracy", "flex", 64), syn.errors((0.5,) * 4))], "lowest_rmse.paper")
    assert found.words == "not run (none of the claim's sizes, only N = 64)" and "fewer cases: FlexAttention" in found.measured


def test_bias_gradients_of_another_type_are_named_and_left_out():
    records = accuracies((1.0,) * 4, {"sdpa": (1.5,) * 4})
    records += [syn.record(syn.cell("accuracy", "cuequivariance", seed=s), syn.errors((1, 1, 1, 0.2), dtype="float32")) for s in (0, 1)]
    found = claim(records, "lowest_rmse.paper")
    assert found.verdict is Verdict.REPRODUCED and "dBias of another type, so not compared: cuEquivariance" in found.measured


def test_what_cannot_be_compared_does_not_hide_what_refutes():
    """Here dBias, which the only peer gives in another type."""

    def words(own, *more):
        records = [syn.record(syn.cell("accuracy", "turbopair.paper"), syn.errors(own)), *more]
        records.append(syn.record(syn.cell("accuracy", "sdpa"), syn.errors((1.0,) * 4, dtype="float32")))
        found = claim(records, "lowest_rmse.paper")
        assert "dK 2.50e-04, level with PyTorch SDPA" in found.measured
        return found.words

    why = "no comparable RMSE of dBias"
    assert words((1.0,) * 4) == f"not run ({why})"
    assert words((3.0, 1.0, 1.0, 1.0)) == f"not reproduced (on 1 of 600 cases; {why})"
    beaten = [lost("turbopair.paper", 1), syn.accuracy("sdpa", seed=1)]
    told = "1 case that only others could do"
    assert words((1.0,) * 4, *beaten) == f"not reproduced (on 1 of 600 cases; {told}; {why}; 1 of 2 oom: out of GPU memory)"
    own = syn.record(syn.cell("accuracy", "turbopair.paper", seed=1), syn.errors((1.0,) * 4))
    partial = [own, syn.record(syn.cell("accuracy", "flex"), syn.errors((0.8,) * 4))]
    partial.append(syn.record(syn.cell("accuracy", "sdpa", seed=1), syn.errors((1.0,) * 4, dtype="float32")))
    above = "above FlexAttention (torch.compile) on the 1 case that it has"
    assert words((1.0,) * 4, *partial) == f"not reproduced (on 2 of 600 cases; {above}; {why})"


@pytest.mark.parametrize("at", [{"n": 384, "slices": 8}, {"n": 384, "family": "offset"}])
def test_a_case_that_nobody_could_do_does_not_take_the_place_of_those_measured(at):
    """Although it is of the inputs and sizes that the claim would rather be judged on; where a peer did it, it refutes."""
    records = [syn.record(syn.cell("accuracy", name, **at), syn.errors((1.0,) * 4)) for name in ("turbopair.paper", "sdpa")]
    alone, without = (
        claim(part, "lowest_rmse.paper") for part in (records, [*records, lost("turbopair.paper", n=768), lost("sdpa", n=768)])
    )
    assert alone.verdict is without.verdict is Verdict.REPRODUCED and without.measured == alone.measured
    assert without.scope == f"{alone.scope}; 1 of 2 oom: out of GPU memory"
    beaten = claim([*records, lost("turbopair.paper", n=768), syn.accuracy("sdpa", 768)], "lowest_rmse.paper")
    why = f"{alone.scope}; 1 case that only others could do; 1 of 2 oom: out of GPU memory"
    assert beaten.words == f"not reproduced ({why})" and "level with PyTorch SDPA" in beaten.measured


@pytest.mark.parametrize("more", [{"n": 96}, {"family": "offset"}])
def test_what_only_others_could_do_beside_the_inputs_and_sizes_judged_is_told(more):
    at = {"n": 64} if "n" in more else {}
    records = [syn.record(syn.cell("accuracy", name, **at), syn.errors((1.0,) * 4)) for name in ("turbopair.paper", "sdpa")]
    found = claim([*records, lost("turbopair.paper", **more), syn.accuracy("sdpa", **more)], "lowest_rmse.paper")
    assert found.verdict is (Verdict.NOT_RUN if at else Verdict.REPRODUCED) and found.scope.endswith("; 1 of 2 oom: out of GPU memory")


def test_lowest_among_nobody_is_no_claim():
    found = claim(accuracies((1.0,) * 4, {}), "lowest_rmse.paper")
    assert found.words == "not run (no other implementation measured on the same cases)"


# --- bitwise ---------------------------------------------------------------------------------------------------------


def test_bitwise_full_partial_and_contradicted():
    everything = [syn.determinism("turbopair.exact", n, d, seed=s) for n, d, s in all_cases()]
    assert claim(everything, "bitwise").words == "reproduced"
    assert claim(everything[:24], "bitwise").words == "reproduced (on 24 of 600 cases)"
    differing = syn.determinism("turbopair.exact", 768, 32, seed=99, differing=("dbias",))
    found = claim([*everything[:-1], differing], "bitwise")
    assert found.verdict is Verdict.NOT_REPRODUCED and "599/600" in found.measured


def test_bitwise_scope_is_that_of_the_least_covered_precision():
    records = [syn.determinism("turbopair.exact", n, d, seed=s) for n, d, s in all_cases()]
    records.append(syn.determinism("turbopair.paper"))
    assert claim(records, "bitwise").words == "reproduced (on 1 of 600 cases)"


def test_bitwise_needs_five_calls_and_a_gpu():
    assert claim([syn.determinism("turbopair.exact", calls=2)], "bitwise").words == "not run (only 2 calls a case, the claim has 5)"
    emulated = claim([syn.determinism("turbopair.exact", environment=syn.CPU)], "bitwise")
    assert emulated.words == "not run (no GPU; the figures are the CPU emulation's)" and "1/1" in emulated.measured


def test_bitwise_of_peers_does_not_count():
    assert claim([syn.determinism("sdpa")], "bitwise").verdict is Verdict.NOT_RUN


@pytest.mark.parametrize(
    ("status", "n", "peer", "verdict"),
    [
        (Status.OOM, 384, "sdpa", Verdict.NOT_REPRODUCED),
        (Status.FAILED, 384, "turbopair.paper", Verdict.NOT_REPRODUCED),
        (Status.OOM, 384, None, Verdict.REPRODUCED),  # nobody could do it
        (Status.CANCELLED, 384, "sdpa", Verdict.REPRODUCED),
        (Status.OOM, 2048, "sdpa", Verdict.REPRODUCED),  # no size of the claim
    ],
)
def test_bitwise_names_failed_cases(status, n, peer, verdict):
    records = [syn.determinism("turbopair.exact"), ended_determinism(status, n), *([syn.determinism(peer, n, seed=1)] if peer else [])]
    found = claim(records, "bitwise")
    told = "1 case that only others could do; " if verdict is Verdict.NOT_REPRODUCED else ""
    of = 3 if peer == "turbopair.paper" else 2
    assert found.words == f"{verdict.value} (on 1 of 600 cases; {told}1 of {of} {status.value}: too large)"


def ended_determinism(status, n=384, environment=syn.H200):
    return syn.record(syn.cell("determinism", "turbopair.exact", n, seed=1), None, status, "too large", environment)


@pytest.mark.parametrize(("n", "calls"), [(64, 5), (384, 3), (64, 3)])
def test_what_refutes_bitwise_refutes_it_beside_cases_that_would_not_be_judged(n, calls):
    done = syn.determinism("turbopair.exact", n, calls=calls)
    found = claim([done, ended_determinism(Status.OOM), syn.determinism("sdpa", seed=1)], "bitwise")
    assert found.verdict is Verdict.NOT_REPRODUCED and f"turbopair (exact) 1/1, {calls} calls" in found.measured
    assert found.scope.endswith("; 1 case that only others could do; 1 of 2 oom: too large")
    nobody = claim([done, ended_determinism(Status.OOM)], "bitwise")
    assert nobody.verdict is Verdict.NOT_RUN


def test_a_case_lost_in_emulation_decides_nothing_of_bitwise():
    records = [syn.determinism("turbopair.exact", environment=syn.CPU), syn.determinism("sdpa", seed=1, environment=syn.CPU)]
    found = claim([*records, ended_determinism(Status.OOM, environment=syn.CPU)], "bitwise")
    assert found.words == "not run (no GPU; the figures are the CPU emulation's)"


def test_bitwise_of_nothing_is_refuted_by_a_peer_only():
    failed = syn.record(syn.cell("determinism", "turbopair.exact"), None, Status.FAILED, "boom")
    assert claim([failed], "bitwise").words == "not run (failed: boom)"
    found = claim([failed, syn.determinism("sdpa")], "bitwise")
    assert found.words == "not reproduced (1 case that only others could do; failed: boom)"


# --- optimizer step --------------------------------------------------------------------------------------------------

BACKENDS = ("pytorch", "lma", "deepspeed", "triton", "cuequivariance_attention", "flex", "cuequivariance")


def steps(own, others=10.0, ranks=16, environment=syn.H100, **more):
    return [syn.step(name, busy=more.get(name, others), ranks=ranks, environment=environment) for name in BACKENDS] + [
        syn.step("turbopair", busy=own, ranks=ranks, environment=environment)
    ]


def test_fastest_step_on_the_claimed_machine_needs_no_qualification():
    assert claim(steps(9.0), "step_lowest").words == "reproduced"
    assert claim(steps(10.5), "step_lowest").words == "not reproduced"


def test_fastest_step_elsewhere_says_where():
    found = claim(steps(9.0, ranks=1, environment=syn.H200)[3:], "step_lowest")
    assert found.words == "reproduced (5 back ends; 1 GPU, not 16; on NVIDIA H200, not H100)"


def ended(name, status, crop=768, ranks=16, reason="why"):
    return syn.record(syn.step(name, crop, ranks=ranks).cell, None, status, reason, syn.H100)


@pytest.mark.parametrize("status", [Status.OOM, Status.FAILED, Status.TIMEOUT])
def test_a_crop_that_turbopair_failed_is_not_won(status):
    records = [syn.step(name, 384, busy, ranks=16) for name, busy in (("triton", 3.0), ("turbopair", 2.0))]
    found = claim([*records, syn.step("triton", ranks=16), ended("turbopair", status)], "step_lowest")
    assert found.words == f"not reproduced (2 back ends; no time of turbopair at crop 768: {status.value}: why)"
    assert found.measured == "crop 384: turbopair 2 s, OpenFold3 Triton 3 s; crop 768: turbopair \u2013, OpenFold3 Triton 9 s"
    alone = claim([syn.step("triton", ranks=16), ended("turbopair", status)], "step_lowest")
    assert alone.verdict is Verdict.NOT_REPRODUCED and alone.cases == "1 crop"
    # the attention alone is turbopair's, too
    records += [syn.step("turbopair_attention", 768, 8.0, ranks=16), syn.step("triton", ranks=16), ended("turbopair", status)]
    assert claim(records, "step_lowest").verdict is Verdict.REPRODUCED


@pytest.mark.parametrize("status", [Status.CANCELLED, Status.NODE_FAIL, Status.NOT_INSTALLED, None])
def test_a_crop_that_was_not_run_is_said(status):
    records = [syn.step(name, crop, busy, ranks=16) for name, busy in (("triton", 3.0), ("turbopair", 2.0)) for crop in (384, 768)]
    left = [ended("turbopair", status)] if status else []
    found = claim([*records[:3], *left], "step_lowest", [record.cell for record in records])
    reason = f"{status.value.replace('_', ' ')}: why" if status else "not run: no record yet"
    assert found.words == f"reproduced (2 back ends; no time of turbopair at crop 768: {reason})" and found.cases == "1 crop"


def test_a_crop_that_no_back_end_could_do_decides_nothing():
    records = [syn.step(name, 384, ranks=16, busy=busy) for name, busy in (("triton", 3.0), ("turbopair", 2.0))]
    records += [ended(name, Status.OOM) for name in ("triton", "turbopair")]
    assert claim(records, "step_lowest").words == "reproduced (2 back ends; no time of turbopair at crop 768: oom: why)"
    none = claim([syn.step("triton", 384, ranks=16), *records[2:]], "step_lowest")
    assert none.words == "not run (turbopair and another back end not both measured; no time of turbopair at crop 768: oom: why)"


def test_back_ends_are_compared_in_one_kind_of_seconds():
    """GPU time against wall time would say nothing: all in wall time where one has no other."""
    records = [syn.step("triton", busy=None, wall=2.5, ranks=16), syn.step("turbopair", busy=2.2, wall=3.0, ranks=16)]
    found = claim(records, "step_lowest")
    assert found.words == "not reproduced (2 back ends; wall time, not GPU time)"
    assert found.measured == "crop 768: turbopair 3 s, OpenFold3 Triton 2.5 s"
    speedup = claim(records, "step_speedup.triton")
    assert speedup.measured == f"0.83{claims.TIMES} (2.5 s against 3 s, wall time)" and speedup.scope == "wall time, not GPU time"
    two = [*records, *(syn.step(name, 384, busy, ranks=16) for name, busy in (("triton", 3.0), ("turbopair", 2.0)))]
    assert claim(two, "step_lowest").scope == "2 back ends; wall time, not GPU time, at some crops"


def test_a_speedup_of_attention_alone_says_its_own_kind_of_seconds():
    records = [syn.step("triton", ranks=16, busy=10.0, wall=12.0), syn.step("turbopair", ranks=16, busy=5.0)]
    found = claim([*records, syn.step("turbopair_attention", ranks=16, busy=None, wall=10.0)], "step_speedup.triton")
    assert found.scope == "" and f"2.00{claims.TIMES} (10 s against 5 s);" in found.measured
    assert found.measured.endswith(f"1.20{claims.TIMES} (12 s against 10 s, wall time)")


@pytest.mark.parametrize(("own", "verdict"), [(10 / 1.73, Verdict.REPRODUCED), (5.0, Verdict.EXCEEDED), (7.0, Verdict.NOT_REPRODUCED)])
def test_step_speedup(own, verdict):
    found = claim(steps(own), "step_speedup.triton")
    assert found.verdict is verdict and found.scope == "" and f"{10 / own:.2f}" in found.measured


def test_step_speedup_tells_what_attention_alone_gives():
    """The claim sets attention and multiplication against a back end of attention alone."""
    busy = {"triton": 10.0, "turbopair": 5.0, "turbopair_attention": 8.0, "cuequivariance": 6.0, "cuequivariance_attention": 12.0}
    records = [syn.step(name, busy=seconds, ranks=16) for name, seconds in busy.items()]
    found = {name: claim(records, f"step_speedup.{name}").measured for name in ("triton", "cuequivariance")}
    times = claims.TIMES
    assert found["triton"].startswith(
        f"2.00{times} (10 s against 5 s); turbopair, attention only against OpenFold3 Triton: 1.25{times} (10 s"
    )
    assert found["cuequivariance"].endswith(
        f"; turbopair, attention only against cuEquivariance, attention only: 1.50{times} (12 s against 8 s)"
    )
    assert "against OpenFold3 Triton:" not in claim(records[:2], "step_speedup.triton").measured


def test_step_speedup_at_another_crop_is_not_the_claim():
    records = [syn.step(name, crop=384, ranks=16) for name in ("triton", "turbopair")]
    assert claim(records, "step_speedup.triton").words == "not run (no step time of OpenFold3 Triton or turbopair at crop 768)"


@pytest.mark.parametrize("baseline", ["triton", "cuequivariance"])
def test_a_step_that_only_the_baseline_could_do_has_no_speedup(baseline):
    key, name = f"step_speedup.{baseline}", summary.label(baseline)
    records = [syn.step(baseline, ranks=16), syn.step("turbopair", 384, ranks=16)]
    found = claim([*records, ended("turbopair", Status.OOM)], key)
    assert found.words == "not reproduced (no step time of turbopair at crop 768: oom: why)" and found.cases == "1 crop"
    assert found.measured == f"turbopair \u2013, {name} 9 s"
    # what was not run decides nothing, nor what neither could do, nor what the baseline lost; all are told
    told = claim([*records, ended("turbopair", Status.CANCELLED)], key)
    assert told.words == "not run (no step time of turbopair at crop 768: cancelled: why)"
    neither = claim([records[1], ended("turbopair", Status.OOM), ended(baseline, Status.OOM)], key)
    assert neither.words == f"not run (no step time of {name} or turbopair at crop 768: oom: why)"
    ahead = claim([syn.step("turbopair", ranks=16), ended(baseline, Status.OOM)], key)
    assert ahead.words == f"not run (no step time of {name} at crop 768: oom: why)"


def test_step_in_wall_time_says_so():
    records = [syn.step(name, busy=None, wall=wall, ranks=16) for name, wall in (("triton", 17.3), ("turbopair", 10.0))]
    assert claim(records, "step_speedup.triton").words == "reproduced (wall time, not GPU time)"


def test_step_without_gpu():
    records = [syn.step(name, ranks=2, environment=syn.CPU) for name in ("triton", "turbopair")]
    for key in ("step_lowest", "step_speedup.triton", "step_speedup.cuequivariance"):
        assert claim(records, key).words == "not run (no GPU)"


# --- as a whole ------------------------------------------------------------------------------------------------------


def test_claims_are_judged_machine_by_machine():
    records = ablation((1.0,) * 4, (0.6,) * 4, environment=syn.H200) + ablation((1.0,) * 4, (0.9,) * 4, environment=syn.H100)
    found = {c.device: c.verdict for c in claims.evaluate(summary.frame(records)) if c.key == "residual"}
    assert found == {"NVIDIA H200": Verdict.REPRODUCED, "NVIDIA H100 80GB HBM3": Verdict.NOT_REPRODUCED}


def test_without_records_every_claim_is_not_run():
    found = claims.evaluate(summary.frame([]))
    assert len(found) == 7 and {c.verdict for c in found} == {Verdict.NOT_RUN} and all(c.scope for c in found)


def test_markdown_has_every_verdict(run):
    found = claims.evaluate(summary.frame(run))
    text = claims.markdown_text(found, ["A note."])
    for c in found:
        assert text.count(c.words) >= 2 and c.statement in text
    assert text.rstrip().endswith("- A note.")
