"""Several processes on this machine, joined through gloo as a launcher would join them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.openfold import ranks

ROOT = Path(__file__).parents[3]


def run_ranks(code, world=2, timeout=120):
    """Run `code` in `world` processes with torchrun's environment; returns (return code, stdout, stderr) of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, **common, "PYTHONPATH": path, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


AGREE = """
import torch
from pipeline.openfold.ranks import join
with join("cpu", timeout_s=60) as ranks:
    total = ranks.reduce(torch.tensor([ranks.rank + 1.0]))
    ranks.agree(None)
    print("sum", total.item(), ranks.gather(ranks.rank), flush=True)
    ranks.agree("the loss is nan" if ranks.rank == 1 else None)
    print("not reached", flush=True)
"""


def test_a_problem_on_one_rank_stops_all_with_its_reason():
    for code, out, err in run_ranks(AGREE):
        assert code == 1
        assert out.strip() == "sum 3.0 [0, 1]"
        assert "StepFailed: rank 1: the loss is nan" in err


SHARE = """
from pipeline.openfold import ranks
ranks._identity = lambda device: "GPU 0 of one"
with ranks.join("cpu", timeout_s=60):
    print("not reached")
"""


def test_ranks_which_share_a_device_are_refused():
    for code, out, err in run_ranks(SHARE):
        assert (code, out) == (1, "")
        assert "ranks 0, 1 share GPU 0 of one; give each rank a device of its own" in err


def test_one_process_needs_no_environment(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with ranks.join("cpu") as alone:
        assert (alone.rank, alone.world, alone.device) == (0, 1, torch.device("cpu"))
        alone.agree(None)
        with pytest.raises(ranks.StepFailed, match=r"^it broke$"):
            alone.agree("it broke")
        with pytest.raises(torch.OutOfMemoryError):
            alone.agree("OutOfMemoryError: too large")


STEP = """
import math, torch
from pipeline.openfold import batches, model
from pipeline.openfold.ranks import join
from pipeline.openfold.step import TrainingStep, checksum
torch.set_num_threads(1)
model.require()
with join("cpu", timeout_s=60) as ranks:
    module = model.build(model.configure(model.find_backend("pytorch"), "reduced"))
    model.fix_recycles(module.model, 0)
    step = TrainingStep(module, batches.crop(batches.read("1y57_384"), 32, msa_rows=8), ranks)
    model.seed_rank(0, ranks.rank)
    losses = [step().loss for _ in range(2)]
    ranks.check_equal("weights", checksum(step.model))
    everyone = ranks.gather(losses)
    assert everyone[0] != everyone[1], everyone
    print("trained", flush=True)
    if ranks.rank == 1:
        with torch.no_grad():
            step.model.pairformer_stack.blocks[0].pair_stack.tri_att_start.mha.linear_q.weight[0, 0] = math.nan
    step()
    print("not reached", flush=True)
"""


@pytest.mark.slow
def test_two_ranks_train_the_same_weights_and_a_nan_on_one_stops_both(openfold3):
    for code, out, err in run_ranks(STEP, timeout=300):
        assert code == 1, err
        assert out.strip() == "trained", err
        assert "StepFailed: rank 1:" in err and "nan" in err.rsplit("StepFailed", 1)[1]
