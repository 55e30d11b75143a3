import math
import mmap
import os
import weakref

import pytest
import torch

from pipeline.cells import Cell
from pipeline.experiments import step_time
from pipeline.implementations import Unsupported
from pipeline.openfold import busy, model, sites
from pipeline.openfold.ranks import Ranks, StepFailed
from pipeline.openfold.step import PHASES, checksum

PAIRFORMER = "pairformer_stack.blocks.1.pair_stack.tri_att_end"


def weights(step):
    return [p.detach().clone() for p in step.model.parameters()]


def test_two_steps_train(make_step):
    step = make_step()
    before, ema_before = weights(step), {name: p.clone() for name, p in step.module.ema.params.items()}
    first = step()
    # the learning rate is warmed up from zero: OpenFold3's first step changes nothing
    assert all(torch.equal(p, q) for p, q in zip(before, weights(step), strict=True))
    second = step()
    changed = [not torch.equal(p, q) for p, q in zip(before, weights(step), strict=True)]
    assert sum(changed) > 0.9 * len(changed)
    ema = step.module.ema.params
    assert any(not torch.equal(ema[name], ema_before[name]) for name in ema)
    for outcome in (first, second):
        assert math.isfinite(outcome.loss) and outcome.loss > 0.1 and outcome.grad_norm > 0.1
        assert outcome.losses["mse_loss"] > 0 and outcome.losses["distogram_loss"] > 0
        phases = [outcome.seconds[name] for name in PHASES]
        assert min(phases) > 0 and 0.9 * outcome.wall < sum(phases) <= outcome.wall
        assert sum(outcome.seconds[f"forward.{part}"] for part in ("trunk", "rollout", "diffusion")) < outcome.seconds["forward"]


def test_step_is_reproducible_and_backends_agree_in_fp32(make_step):
    stock, again, lma = (make_step(name, bf16=False) for name in ("pytorch", "pytorch", "lma"))
    with model.counting_calls(model.find_backend("lma")) as calls:
        outcomes = [step_once(step) for step in (stock, again, lma)]
    assert calls[0] > 0
    assert outcomes[0].loss == outcomes[1].loss and outcomes[0].grad_norm == outcomes[1].grad_norm
    assert outcomes[2].loss == pytest.approx(outcomes[0].loss, rel=1e-5)
    assert outcomes[2].grad_norm == pytest.approx(outcomes[0].grad_norm, rel=1e-3)


def step_once(step):
    model.seed_rank(0, 0)
    return step()


def test_recorded_sites_hold_what_the_attention_computes(make_step):
    step = make_step(bf16=False)
    with sites.recording(step.model, {"site": PAIRFORMER}) as records:
        step()
    r = records["site"]
    n, d = r.q.shape[1], r.q.shape[3]
    assert r.bias.shape == (4, n, n) and r.mask.shape == (n, n) and r.mask.all()
    logits = torch.einsum("iqhd,ikhd->ihqk", r.q, r.k) * d**-0.5 + r.bias
    torch.testing.assert_close(torch.einsum("ihqk,ikhd->iqhd", logits.softmax(-1), r.v), r.out, rtol=1e-4, atol=1e-5)
    assert r.dout.shape == r.q.shape and (r.dout != 0).float().mean() > 0.99
    assert type(step.model.pairformer_stack.blocks[1].pair_stack.tri_att_end.mha).__name__ == "Attention"


def test_without_filling_no_gradient_reaches_the_attention(make_step):
    """The reason why weights are filled: it must not pass unnoticed if OpenFold3's initialisation changes."""
    step = make_step(fill=0.0)
    with sites.recording(step.model, {"site": PAIRFORMER}) as records:
        step()
    assert not records["site"].dout.any()


def test_a_gradient_that_is_not_finite_stops_the_step(make_step):
    step = make_step()
    step.model.pairformer_stack.blocks[0].pair_stack.tri_att_start.mha.linear_v.weight.register_hook(lambda g: g * math.nan)
    before = checksum(step.model)
    with pytest.raises(StepFailed, match="the norm of the gradient is nan at a loss of"):
        step()
    assert checksum(step.model) == before


def test_a_failed_alignment_stops_the_step(make_step):
    """OpenFold3 logs it, zeroes the losses if its fallback fails too, and goes on."""
    step = make_step()
    step.batch["ground_truth"]["mol_sym_token_index"] += 10_000
    with pytest.raises(RuntimeError, match="permutation alignment failed"):
        step()


def cell(implementation, n=32, **options):
    options = {"size": "reduced", "recycles": 0, "warmup_steps": 1, "steps": 1, "msa_rows": 8, **options}
    sizes = {"n": n, "slices": n, "heads": 4, "head_dim": 32}
    return Cell(experiment="step_time", implementation=implementation, **sizes, family="openfold", seed=0, options=options)


def test_experiment_gives_its_metrics(openfold3):
    metrics = step_time.run(cell("lma"), torch.device("cpu"))
    assert {f"s.{phase}" for phase in PHASES} | {"s.wall", "loss", "grad_norm", "peak_bytes", "ranks"} <= set(metrics)
    assert metrics["loss"] > 0 and metrics["grad_norm"] > 0 and metrics["backend_calls"] > 0 and metrics["ranks"] == 1
    assert metrics["dtype.attention"] == metrics["dtype.bias"] == "bfloat16" and metrics["dtype.parameters"] == "float32"
    assert metrics["batch"] == "1y57_384, window of 32" and metrics["msa_rows"] == 8
    assert metrics["setup_s"] > 0


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (cell("triton"), "needs a CUDA device; this is cpu"),
        (cell("cuequivariance"), "needs a CUDA device; this is cpu"),
        (cell("lma", ranks_per_node=2), "needs 2 ranks and this is one of 1"),
        (cell("lma", n=1000), "no stored OpenFold3 batch has 1000 tokens"),
        (cell("flashy"), "no backend 'flashy'; it has pytorch, lma"),
    ],
    ids=["triton", "cuequivariance", "ranks", "tokens", "name"],
)
def test_experiment_refuses_with_a_reason(openfold3, case, reason):
    with pytest.raises(Unsupported, match=reason):
        step_time.run(case, torch.device("cpu"))


def checksums(batch):
    """What a batch holds, in a form that compares."""
    if isinstance(batch, torch.Tensor):
        return batch.dtype, tuple(batch.shape), batch.double().sum().item(), batch.double().square().sum().item()
    if isinstance(batch, dict):
        return {key: checksums(value) for key, value in batch.items()}
    return [checksums(value) for value in batch] if isinstance(batch, list) else batch


def test_cells_of_one_process_leave_no_model_behind(openfold3, monkeypatch):
    """Weights are drawn and the batch is read once; a model is gone when its cell ends, also when the cell fails."""
    alive, drawn, samples = [], [], []
    original, build = step_time.TrainingStep, model.build

    def remembered(module, *args, **options):
        alive.append(weakref.ref(module))
        samples.append((args[0], checksums(args[0])))
        return original(module, *args, **options)

    monkeypatch.setattr(step_time, "TrainingStep", remembered)
    monkeypatch.setattr(model, "build", lambda *args, **options: drawn.append(args) or build(*args, **options))
    model._drawn.cache_clear()
    metrics = [step_time.run(cell(name), torch.device("cpu")) for name in ("turbopair", "pytorch")]
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-3)

    def broken(network):
        raise RuntimeError("it broke")

    monkeypatch.setattr(step_time, "checksum", broken)
    with pytest.raises(RuntimeError, match="it broke"):
        step_time.run(cell("lma"), torch.device("cpu"))
    assert len(alive) == 3 and len(drawn) == 1
    assert all(sample is samples[0][0] and before == samples[0][1] == checksums(sample) for sample, before in samples)
    assert [reference() for reference in alive] == [None] * 3


def test_recomputation_is_timed_inside_the_backward(make_step):
    outcome = make_step()()
    assert 0 < outcome.seconds["backward.recompute"] < outcome.seconds["backward"]


def test_the_profile_of_a_step_becomes_metrics(monkeypatch):
    work = busy.Busy(total=3.0, compute=2.0, communication=1.5, events=7, parts={"attention": 0.5, "other": 1.5})
    monkeypatch.setattr(busy, "measure", lambda step: (work, {"odd_kernel": 1.4999, "rare_kernel": 1e-4}))
    alone = step_time._gpu(None, Ranks(0, 1, torch.device("cpu")))
    assert alone.pop("profile_s") >= 0
    assert alone == {
        "s.gpu_busy": 2.0, "gpu_communication": 1.5, "gpu_events": 7, "gpu.attention": 0.5, "gpu.other": 1.5,
        "gpu.unknown": "odd_kernel 1.4999",
    }  # fmt: skip
    two = Ranks(0, 2, torch.device("cpu"))
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, 2 * value])
    shared = step_time._gpu(None, two)
    assert shared["s.gpu_busy"] == 4.0 and shared["gpu_busy.rank0"] == 2.0 and shared["gpu_busy.rank1"] == 4.0


def test_backends_which_would_silently_be_pytorch_are_refused():
    assert "up to 100 tokens; asked for 100" in model.unsupported(model.find_backend("cuequivariance"), 100, torch.device("cuda"))
    assert model.unsupported(model.find_backend("cuequivariance"), 101, torch.device("cuda")) is None


def test_the_peak_on_a_cpu_is_not_that_of_an_earlier_cell() -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not let a process begin its high-water mark anew")
    step_time._forget_resident_peak()
    before = step_time._resident_peak()
    with mmap.mmap(-1, 2**28) as fresh:  # malloc could serve 256 MiB from what earlier tests gave back
        for page in range(0, 2**28, mmap.PAGESIZE):
            fresh[page] = 1
    large = step_time._resident_peak()
    step_time._forget_resident_peak()
    assert large - before > 200 * 2**20
    assert large - step_time._resident_peak() > 200 * 2**20
