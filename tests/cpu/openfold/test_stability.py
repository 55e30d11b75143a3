import math

import pytest
import torch

from pipeline.cells import Cell
from pipeline.config import ConfigError, ExperimentConfig, check_names
from pipeline.curves import decode
from pipeline.experiments import stability
from pipeline.implementations import Unsupported
from pipeline.openfold import alignment, model
from pipeline.openfold.gradients import distance
from pipeline.openfold.ranks import Ranks
from pipeline.openfold.step import TrainingStep
from pipeline.plan import plan

CPU = torch.device("cpu")


def cell(name, n=32, **options):
    sizes = {"n": n, "slices": n, "heads": 4, "head_dim": 32}
    options = {"steps": 2, "every": 2, "msa_rows": 8, **options}
    return Cell(experiment="stability", implementation=name, **sizes, family="openfold", seed=0, options=options)


@pytest.fixture(scope="module")
def exact(openfold3):
    return stability.run(cell(stability.FP32, steps=3), CPU)


def test_the_fp32_run_is_at_no_distance_from_itself(exact):
    # the weights of the third step differ from the first ones: the twin has followed
    assert decode(exact["curve.distance"]) == decode(exact["curve.distance_triangle"]) == [0.0, 0.0]
    losses = decode(exact["curve.loss"])
    assert len(losses) == exact["steps_done"] == 3 and len(set(losses)) == 3 and min(losses) > 0.1
    assert exact["loss.first"] == pytest.approx(sum(losses) / 3) and "diverged" not in exact


@pytest.mark.slow
def test_turbopair_sees_the_same_batches_and_noise_and_is_close(exact):
    own = stability.run(cell("turbopair.exact"), CPU)
    assert decode(own["curve.loss"]) == pytest.approx(decode(exact["curve.loss"])[:2], rel=1e-3)
    (apart,), (triangle,) = decode(own["curve.distance"]), decode(own["curve.distance_triangle"])
    assert 1e-5 < apart < 0.05 and 1e-5 < triangle < 0.1


def test_a_run_that_diverges_says_where(openfold3, monkeypatch):
    original, calls = TrainingStep._not_sound, []

    def not_sound(self, loss, losses):
        calls.append(loss)
        return original(self, loss if len(calls) < 2 else math.nan, losses)

    monkeypatch.setattr(TrainingStep, "_not_sound", not_sound)
    monkeypatch.setattr(stability, "_distances", lambda *args: {"distance": 0.1, "distance_triangle": 0.2})
    metrics = stability.run(cell("pytorch", steps=3, every=1), CPU)
    assert metrics["diverged"].startswith("at step 1: the loss is nan") and metrics["steps_done"] == 1
    assert len(decode(metrics["curve.loss"])) == 1 and decode(metrics["curve.distance"]) == [0.1, 0.1]


@pytest.mark.slow
def test_a_weight_that_is_not_finite_ends_the_run_and_not_the_record(openfold3, monkeypatch):
    original = stability._distances

    def poisoned(step, *args):
        step.model.pairformer_stack.blocks[0].pair_stack.tri_mul_out.linear_g.weight.data[0, 0] = math.nan
        return original(step, *args)

    monkeypatch.setattr(stability, "_distances", poisoned)
    metrics = stability.run(cell("pytorch", steps=2, every=1), CPU)
    assert metrics["diverged"].startswith("at step 0: the loss is nan") and metrics["steps_done"] == 0
    assert decode(metrics["curve.distance"]) == decode(metrics["curve.loss"]) == []


def test_a_distance_that_is_not_finite_ends_the_run(openfold3, monkeypatch):
    monkeypatch.setattr(stability, "_distances", lambda *args: {"distance": math.inf, "distance_triangle": 0.2})
    metrics = stability.run(cell("pytorch", steps=2, every=1), CPU)
    assert metrics["diverged"] == "at step 0: the distance of the gradient from fp32 is inf" and metrics["steps_done"] == 0
    assert decode(metrics["curve.distance"]) == [] and decode(metrics["curve.distance_triangle"]) == [0.2]


@pytest.mark.parametrize("bf16", [True, False])
def test_neither_the_alignment_on_the_host_nor_a_bare_step_changes_what_is_trained(make_step, bf16):
    plain, bare = make_step(bf16=bf16), make_step(bf16=bf16)
    bare = TrainingStep(bare.module, {}, Ranks(0, 1, CPU), bf16=bf16, bare=True)
    samples = stability.samples_of(32, 0, 8)
    for number in range(2):
        plain.batch = next(samples)
        model.seed_rank(number, 0)
        expected = plain()
        with alignment.on_host(plain.batch, CPU) as bare.batch:
            assert "ref_space_uid_to_perm" not in bare.batch
            model.seed_rank(number, 0)
            outcome = bare()
        assert outcome.losses == expected.losses and outcome.grad_norm == expected.grad_norm
        assert not {"metrics", "ema"} & outcome.seconds.keys()
    for one, other in zip(plain.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_alignment_that_fails_on_the_host_stops_the_step(make_step):
    step = make_step()
    sample = {**step.batch, "ref_space_uid_to_perm": [{}]}
    with alignment.on_host(sample, CPU) as step.batch, pytest.raises(RuntimeError, match="permutation alignment failed"):
        step()


def test_a_bare_step_is_of_one_rank(make_step):
    with pytest.raises(ValueError, match="a step of 2 ranks cannot leave out the average"):
        TrainingStep(make_step().module, {}, Ranks(0, 2, CPU), bare=True)


def test_progress_is_in_the_log(capsys):
    assert list(stability._told(iter(range(45)), "pytorch", 45)) == list(range(45))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["pytorch: 20 of 45 steps", "pytorch: 40 of 45 steps"]
    assert all(line.endswith(" s a step") for line in lines)


def test_samples_take_turns_and_windows_move():
    samples = stability.samples_of(64, 0, 4)
    first = [next(samples) for _ in range(5)]
    assert all(sample["token_mask"].shape == (1, 64) and sample["msa"].shape[1] == 4 for sample in first)
    assert all(float(sample["loss_weights"]["smooth_lddt"]) == 4.0 for sample in first)
    positions = [sample["ref_pos"].shape[1] for sample in first]
    again = stability.samples_of(64, 0, 4)
    assert [next(again)["ref_pos"].shape[1] for _ in range(5)] == positions and len(set(positions)) > 2
    whole = stability.samples_of(384, 0, 4)
    assert [int(next(whole)["token_mask"].sum()) for _ in range(2)] == [384, 294]  # the second is padded
    with pytest.raises(ValueError, match="no stored OpenFold3 batch has 1000 tokens"):
        next(stability.samples_of(1000, 0, 4))


def test_runs_are_planned_and_their_names_checked():
    config = ExperimentConfig.model_validate({"name": "t", "stability": {"crops": [64], "steps": 3, "every": 2}})
    check_names(config, "here")
    cells = plan(config)
    assert [c.implementation for c in cells] == config.stability.runs and {c.experiment for c in cells} == {"stability"}
    assert cells[0].options == {"steps": 3, "every": 2, "recycles": 0, "size": "reduced"} and cells[0].ranks == 1
    wrong = ExperimentConfig.model_validate({"name": "t", "stability": {"runs": ["turbopair.exakt"]}})
    with pytest.raises(ConfigError, match=r"stability\.runs: unknown run 'turbopair\.exakt' \(did you mean 'turbopair\.exact'\?\)"):
        check_names(wrong, "here")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cuequivariance", "needs a CUDA device"),
        ("turbopair.x", "no run 'turbopair.x'; it has pytorch_fp32"),
        ("odd", "no backend 'odd'"),
    ],
)
def test_what_cannot_run_has_a_reason(openfold3, name, reason):
    with pytest.raises(Unsupported, match=reason):
        stability.run(cell(name), CPU)


def test_a_crop_without_a_batch_is_refused_before_a_model_is_built(openfold3, monkeypatch):
    monkeypatch.setattr(model, "fresh", lambda *args: pytest.fail("a model was built"))
    with pytest.raises(Unsupported, match="no stored OpenFold3 batch has 1000 tokens"):
        stability.run(cell("pytorch", n=1000), CPU)


def test_every_name_is_a_run():
    for name in stability.names():
        backend, bf16 = stability._backend(name)
        assert backend.name in model.BACKENDS and bf16 == (name != stability.FP32)


def test_distance_is_relative_and_refuses_what_says_nothing():
    a, b = {"x": torch.ones(4), "y": torch.zeros(2)}, {"x": torch.ones(4) * 1.1, "y": torch.zeros(2)}
    assert distance(a, b) == pytest.approx(0.1) and distance(a, a) == 0
    with pytest.raises(ValueError, match="the expected gradient is zero"):
        distance(a, b, lambda name: name == "y")
    with pytest.raises(ValueError, match="1 parameters have a gradient on one side only, y among them"):
        distance(a, {"x": a["x"]})
