import pytest
import torch

from pipeline.openfold import batches


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("stored", batches.STORED, ids=lambda stored: stored.name)
def test_stored_batch_is_what_the_table_says(stored):
    batch = batches.read(stored.name)
    assert batch["token_mask"].shape == (1, stored.tokens)
    assert int(batch["token_mask"].sum()) == stored.real_tokens
    assert batch["ground_truth"]["atom_resolved_mask"].any()
    assert batch["num_atoms_per_token"].sum() == batch["atom_mask"].shape[1]


@pytest.mark.parametrize("name", ["1y57_384", "2q2k_384"])
def test_a_crop_to_all_tokens_changes_nothing(name):
    """In particular, the rule for the ground truth selects exactly what OpenFold3's own crop selected."""
    batch = batches.read(name)
    assert equal(batches.crop(batch, batch["token_mask"].shape[1]), batch)


@pytest.mark.parametrize("name", ["1y57_384", "2q2k_384"])
@pytest.mark.parametrize("seed", [0, 1])
def test_crop_is_consistent(name, seed):
    batch = batches.read(name)
    cropped = batches.crop(batch, 48, seed, msa_rows=4)
    counts = cropped["num_atoms_per_token"][0].long()
    assert cropped["token_mask"].shape == (1, 48) and cropped["token_mask"].all()
    assert cropped["token_bonds"].shape == (1, 48, 48) and cropped["template_distogram"].shape[:4] == (1, 4, 48, 48)
    assert cropped["msa"].shape == (1, 4, 48, 32)
    assert torch.equal(cropped["atom_to_token_index"][0].long(), torch.repeat_interleave(torch.arange(48), counts))
    assert torch.equal(cropped["start_atom_index"][0].long(), counts.cumsum(0) - counts)
    assert set(cropped["ref_space_uid"][0].tolist()) == set(cropped["ref_space_uid_to_perm"][0])
    # whole components only: each permutation covers all atoms of its component
    for uid, permutations in cropped["ref_space_uid_to_perm"][0].items():
        assert permutations.shape[1] == int((cropped["ref_space_uid"] == uid).sum())
    # real tokens of a batch follow each other, so the reference positions must be a contiguous part of the original
    start = int((batch["token_index"][0] == cropped["token_index"][0, 0]).nonzero()[0])
    atoms = (batch["atom_to_token_index"][0] >= start) & (batch["atom_to_token_index"][0] < start + 48)
    assert torch.equal(cropped["ref_pos"], batch["ref_pos"][:, atoms])


def test_crop_is_drawn_by_the_seed():
    batch = batches.read("1y57_384")
    first = [int(batches.crop(batch, 48, seed)["token_index"][0, 0]) for seed in range(5)]
    assert len(set(first)) > 1
    assert first == [int(batches.crop(batch, 48, seed)["token_index"][0, 0]) for seed in range(5)]


def test_copy_shares_no_memory():
    batch = batches.read("2q2k_384")
    copied = batches.copy(batch)
    assert equal(copied, batch)
    copied["ground_truth"]["atom_positions"].zero_()
    copied["ref_space_uid_to_perm"][0].clear()
    assert batch["ground_truth"]["atom_positions"].any() and batch["ref_space_uid_to_perm"][0]


@pytest.mark.parametrize(("tokens", "name"), [(64, "1y57_384"), (384, "1y57_384"), (385, "3zee_640"), (768, "3zee_768")])
def test_batch_for_a_number_of_tokens(tokens, name):
    assert batches.for_tokens(tokens).name == name


def test_refusals_say_what_there_is():
    with pytest.raises(ValueError, match="no stored OpenFold3 batch has 769 tokens; 1 to 768 are available"):
        batches.for_tokens(769)
    with pytest.raises(ValueError, match="unknown OpenFold3 batch '1abc'; stored are 1y57_384"):
        batches.read("1abc")
    with pytest.raises(ValueError, match="cannot crop 384 tokens to 400"):
        batches.crop(batches.read("2q2k_384"), 400)
