"""Real OpenFold3 training batches (`data/batches/*.npz`), and a consistent crop of one.

A stored batch is what OpenFold3's featurizer and collator give for one training sample: a dict of CPU tensors with a
leading batch dimension of 1, a nested `ground_truth` dict, `loss_weights`, and `ref_space_uid_to_perm` (atom orders that
are equivalent by symmetry, one dict a sample). The files need numpy and torch only; `data/README.md` says where they are from.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent / "data" / "batches"

Batch = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """One stored batch: its name (also the file name), tokens with and without padding, and what it holds."""

    name: str
    tokens: int
    real_tokens: int
    holds: str


STORED = (
    Stored("1y57_384", 384, 384, "protein and ligand, no padded token"),
    Stored("2q2k_384", 384, 294, "protein and DNA, 90 padded tokens"),
    Stored("3zee_640", 640, 640, "protein assembly, no padded token"),
    Stored("3zee_768", 768, 768, "protein assembly, no padded token"),
)


def names() -> list[str]:
    """Names of the stored batches."""
    return [stored.name for stored in STORED]


def for_tokens(n: int) -> Stored:
    """The stored batch to train on at `n` tokens: the smallest without padding which has at least `n`.

    Raises ValueError if none is large enough.
    """
    fits = [s for s in STORED if s.real_tokens >= n]
    if n < 1 or not fits:
        largest = max(s.real_tokens for s in STORED)
        raise ValueError(f"no stored OpenFold3 batch has {n} tokens; 1 to {largest} are available")
    return min(fits, key=lambda s: s.tokens)


def read(name: str) -> Batch:
    """The stored batch `name` as tensors on the CPU. Raises ValueError for an unknown name, FileNotFoundError without its file."""
    if name not in names():
        raise ValueError(f"unknown OpenFold3 batch {name!r}; stored are {', '.join(names())}")
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    encodings, batch = json.loads(arrays.pop("@meta").tobytes().decode())
    permutations: dict[int, dict[int, torch.Tensor]] = {}
    for key, (encoding, size, dtype_name) in encodings.items():
        tensor = _decode(arrays[key], encoding, size, getattr(torch, dtype_name))
        head, _, tail = key.partition("/")
        if head == "@perm":
            sample, uid = tail.split("/")
            permutations.setdefault(int(sample), {})[int(uid)] = tensor
        elif tail:
            batch.setdefault(head, {})[tail] = tensor
        else:
            batch[head] = tensor
    batch["ref_space_uid_to_perm"] = [permutations[sample] for sample in sorted(permutations)]
    return batch


def _decode(array: np.ndarray, encoding: str, size: Any, dtype: torch.dtype) -> torch.Tensor:
    """One tensor from its stored form: `raw`, `zeros` (only the shape is kept) or `onehot` (an index, 255 = all zero)."""
    if encoding == "zeros":
        return torch.zeros(size, dtype=dtype)
    if encoding == "raw":
        return torch.from_numpy(array).to(dtype)
    if encoding == "onehot":
        index = torch.from_numpy(array).long()
        onehot = torch.zeros(*index.shape, size, dtype=dtype)
        return onehot.scatter_(-1, index.clamp(max=size - 1)[..., None], (index != 255)[..., None].to(dtype))
    raise ValueError(f"unknown encoding {encoding!r} in a stored OpenFold3 batch; known are raw, zeros, onehot")


# Which dimensions of a feature run over tokens, atoms, or MSA rows; all others are copied.
_TOKEN_DIMS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(["token_index", "residue_index", "asym_id", "entity_id", "sym_id", "restype", "token_mask", "cyclic_mask"], (1,)),
    **dict.fromkeys(["is_protein", "is_rna", "is_dna", "is_ligand", "is_atomized", "num_atoms_per_token", "start_atom_index"], (1,)),
    **dict.fromkeys(["mol_entity_id", "mol_sym_id", "mol_sym_token_index", "mol_sym_component_id", "deletion_mean", "profile"], (1,)),
    **dict.fromkeys(["msa", "has_deletion", "deletion_value", "msa_mask"], (2,)),
    **dict.fromkeys(["template_restype", "template_pseudo_beta_mask", "template_backbone_frame_mask"], (2,)),
    **dict.fromkeys(["template_distogram", "template_unit_vector"], (2, 3)),
    "token_bonds": (1, 2),
}
_REFERENCE_FEATURES = ["ref_pos", "ref_mask", "ref_element", "ref_charge", "ref_atom_name_chars", "ref_space_uid"]
_ATOM_FEATURES = frozenset([*_REFERENCE_FEATURES, "atom_mask", "atom_to_token_index", "atom_positions", "atom_resolved_mask"])
_MSA_FEATURES = frozenset(["msa", "has_deletion", "deletion_value", "msa_mask"])


def crop(batch: Batch, tokens: int, seed: int = 0, msa_rows: int | None = None) -> Batch:
    """A smaller batch of the same kind: `tokens` contiguous tokens, all their atoms, the first `msa_rows` rows of the MSA.

    The window is drawn by `seed` among those which begin and end between two chemical components, so that no ligand is cut.
    As in OpenFold3's own crops, the ground truth keeps every copy of the cropped tokens in symmetry-equivalent molecules.
    Raises ValueError if the batch has fewer tokens, or no such window.
    """
    have = batch["token_mask"].shape[1]
    if not 1 <= tokens <= have:
        raise ValueError(f"cannot crop {have} tokens to {tokens}; give 1 to {have}")
    if tokens == have:
        return _select(batch, torch.arange(have), msa_rows)
    starts = _window_starts(batch, tokens)
    if not starts:
        raise ValueError(f"no window of {tokens} tokens begins and ends between two components; another size may fit")
    start = starts[int(torch.randint(len(starts), (), generator=torch.Generator().manual_seed(seed)))]
    return _select(batch, torch.arange(start, start + tokens), msa_rows)


def _window_starts(batch: Batch, tokens: int) -> list[int]:
    """First tokens of the windows which hold only real tokens and cut no component."""
    mask = batch["token_mask"][0].bool()
    component = torch.stack([batch["mol_entity_id"][0], batch["mol_sym_id"][0], batch["mol_sym_component_id"][0]])
    edge = (component[:, 1:] != component[:, :-1]).any(0)
    boundary = torch.cat([torch.ones(1, dtype=torch.bool), edge, torch.ones(1, dtype=torch.bool)])
    last = len(mask) - tokens
    return [s for s in range(last + 1) if boundary[s] and boundary[s + tokens] and mask[s : s + tokens].all()]


def _select(batch: Batch, keep: torch.Tensor, msa_rows: int | None) -> Batch:
    atoms = torch.isin(batch["atom_to_token_index"][0], keep).nonzero()[:, 0]
    out = _index_features(batch, keep, atoms)
    first = int(keep[0])
    out["atom_to_token_index"] = out["atom_to_token_index"] - first
    if len(atoms):
        # padded tokens have start 0 and no atoms
        out["start_atom_index"] = (out["start_atom_index"] - atoms[0]).clamp(min=0).to(batch["start_atom_index"].dtype)
    uids = set(out["ref_space_uid"][0].tolist())
    out["ref_space_uid_to_perm"] = [{uid: p for uid, p in batch["ref_space_uid_to_perm"][0].items() if uid in uids}]
    out["ground_truth"] = _select_ground_truth(batch["ground_truth"], out)
    if msa_rows is not None:
        for key in _MSA_FEATURES:
            out[key] = out[key][:, :msa_rows]
        out["num_paired_seqs"] = out["num_paired_seqs"].clamp(max=msa_rows)
    return out


def _select_ground_truth(truth: Batch, cropped: Batch) -> Batch:
    """Ground-truth tokens which are some copy of a cropped token, with their atoms."""

    def keys(features: Batch) -> torch.Tensor:
        return features["mol_entity_id"][0].long() * 2**32 + features["mol_sym_token_index"][0].long()

    wanted = keys(cropped)[cropped["token_mask"][0].bool()]
    tokens = torch.isin(keys(truth), wanted) & truth["token_mask"][0].bool()
    per_token = truth["num_atoms_per_token"][0].long()
    atoms = torch.repeat_interleave(tokens, per_token).nonzero()[:, 0]
    out = _index_features(truth, tokens.nonzero()[:, 0], atoms)
    counts = out["num_atoms_per_token"]
    out["start_atom_index"] = (counts.cumsum(1) - counts).to(counts.dtype)
    return out


def _index_features(features: Batch, tokens: torch.Tensor, atoms: torch.Tensor) -> Batch:
    out: Batch = {}
    for key, value in features.items():
        if key in _ATOM_FEATURES:
            value = _take(value, 1, atoms)
        for dim in _TOKEN_DIMS.get(key, ()):
            value = _take(value, dim, tokens)
        out[key] = value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value
    return out


def _take(value: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """`index_select` for an ascending index; a view if it has no gaps, which takes a tenth of the time for features of pairs."""
    if len(index) and int(index[-1] - index[0]) == len(index) - 1:
        return value.narrow(dim, int(index[0]), len(index))
    return value.index_select(dim, index)


def copy(batch: Any, device: torch.device | None = None) -> Any:
    """A copy of a (nested) batch whose tensors may be changed in place, on `device` if given."""
    if isinstance(batch, torch.Tensor):
        return batch.clone() if device is None else batch.to(device, copy=True)
    if isinstance(batch, dict):
        return {key: copy(value, device) for key, value in batch.items()}
    if isinstance(batch, list):
        return [copy(value, device) for value in batch]
    return batch
