import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline import config, experiments, plan
from pipeline.implementations import Unsupported
from pipeline.openfold import capture, sites
from pipeline.records import Status

TENSORS = ("q", "k", "v", "dout")


def test_sample_covers_what_it_should():
    found = capture.sites()
    assert {(s.head_dim, s.padded) for s in found} == {(16, False), (16, True), (32, False), (32, True)}
    assert {s.ending for s in found} == {True, False}
    assert {s.module.split(".")[0] for s in found} == {"template_embedder", "msa_module", "pairformer_stack"}
    assert all(s.tokens == 384 and s.heads == 4 and len(s.rows) >= 4 for s in found)
    assert capture.FILE.stat().st_size < 9e6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n", "slices", "heads", "head_dim"), [(384, 4, 4, 32), (64, 6, 4, 32), (96, 3, 2, 16), (400, 5, 1, 16)])
def test_load_gives_shapes_and_dtypes(n, slices, heads, head_dim, seed):
    loaded = capture.load(n, slices, heads, head_dim, seed)
    for name in TENSORS:
        assert loaded[name].shape == (slices, n, heads, head_dim) and loaded[name].dtype == torch.bfloat16, name
        assert loaded[name].is_contiguous() and loaded[name].isfinite().all()
    assert loaded["bias"].shape == (heads, n, n) and loaded["bias"].dtype == torch.bfloat16
    assert loaded["mask"].shape == (slices, n) and loaded["mask"].dtype == torch.bool
    assert loaded["scale"] == head_dim**-0.5
    for name in (*TENSORS, "bias"):
        assert loaded[name].float().std() > 0.1, name


def test_load_needs_no_openfold3():
    hide = "import sys; sys.modules['openfold3'] = None; "
    code = hide + "from pipeline.openfold import capture; print(capture.load(16, 1, 4, 32, 0)['q'].shape)"
    root = Path(__file__).parents[3]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "torch.Size([1, 16, 4, 32])", ran.stderr


def test_load_is_deterministic_and_seeds_differ():
    a, b, c = (capture.load(64, 4, 4, 32, seed) for seed in (3, 3, 4))
    assert all(torch.equal(a[name], b[name]) for name in (*TENSORS, "bias", "mask"))
    assert not torch.equal(a["q"], c["q"])


def test_padded_sites_have_masked_keys_and_fully_masked_slices_without_gradient():
    loaded = capture.load(384, 4, 4, 32, seed=0, padded=True)
    mask, dout = loaded["mask"], loaded["dout"]
    assert (mask.sum(1) == 294).sum() == 3 and (mask.sum(1) == 0).sum() == 1
    assert not dout[~mask].any(), "a padded token has a gradient"
    assert dout[mask].float().square().mean().sqrt() > 0.5
    # as large as OpenFold3's own, not 1e-10: nothing is lost when it is compared or squared
    assert 0.1 < dout[mask].float().abs().mean() < 10


def test_sites_without_padding_attend_everywhere():
    assert capture.load(96, 4, 4, 16, seed=1, padded=False)["mask"].all()


@pytest.mark.parametrize("n", [16, 63, 64, 200, 383])
def test_windows_keep_at_least_half_real_tokens(n):
    for seed in range(20):
        mask = capture.load(n, 4, 1, 16, seed, padded=True)["mask"]
        assert mask.any(0).sum() * 2 >= n


def test_tiled_slices_differ_and_keep_their_values():
    loaded = capture.load(384, 12, 1, 16, seed=0)
    for name in ("q", "k", "v"):
        flat = loaded[name].flatten(1)
        assert len({tuple(row[:64].tolist()) for row in flat}) == 12, f"two tiled slices have the same {name}"
    # a shifted slice holds the same tokens in another order
    first, shifted = loaded["v"][0, :, 0], loaded["v"][4, :, 0]
    assert torch.equal(first.roll(-37, dims=0), shifted)


def test_tiled_tokens_repeat():
    loaded = capture.load(768, 1, 4, 16, seed=0)
    assert torch.equal(loaded["k"][:, :384], loaded["k"][:, 384:])
    assert torch.equal(loaded["bias"][:, :384, :384], loaded["bias"][:, 384:, :384])


def test_refusals_say_what_there_is():
    with pytest.raises(Unsupported, match="recorded with head dimension 16 and 32, not 64"):
        capture.load(64, 4, 4, 64, 0)
    with pytest.raises(Unsupported, match="recorded with 4 heads, not 8"):
        capture.load(64, 4, 8, 32, 0)
    with pytest.raises(ValueError, match="at least one token and one slice"):
        capture.load(0, 4, 4, 32, 0)


def test_sizes_that_were_not_recorded_are_unsupported_not_failed():
    section = {"implementations": ["eager"], "crops": [16], "head_dims": [128], "slices": 2, "families": ["openfold"]}
    (cell,) = plan.plan(config.ExperimentConfig.model_validate({"name": "t", "accuracy": section}))
    record = experiments.execute(cell, torch.device("cpu"))
    assert record.status is Status.UNSUPPORTED and "16 and 32, not 128" in record.reason


def test_bits_survive_storage():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(capture._from_bits(capture._to_bits(every)).view(torch.int16), every.view(torch.int16))


def test_a_capture_without_gradient_is_refused(tmp_path):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 4, 1, 8, generator=generator).bfloat16()
    bias, mask = torch.zeros(1, 4, 4).bfloat16(), torch.ones(4, 4, dtype=torch.bool)
    for dout in (None, torch.zeros_like(q)):
        recorded = sites.Recorded(q, q, q, bias, mask, q, dout)
        with pytest.raises(ValueError, match="no gradient reached msa_start on 1y57_384"):
            capture.write(tmp_path / "out.npz", {"1y57_384": {"msa_start": recorded}}, slices=2)
