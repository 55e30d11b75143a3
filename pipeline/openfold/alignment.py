"""OpenFold3's permutation alignment on the host.

Between rollout and diffusion OpenFold3 matches the ground truth with the prediction, component by component: some thousands of
operations on a few numbers each, and after most of them the host waits for the result. On a GPU that several processes share, each
wait is a turn of all the others; on the host, the whole takes tens of milliseconds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.openfold import batches

_PERMUTATIONS = "ref_space_uid_to_perm"
#: large features that the alignment does not read
_NOT_READ = ("template_", "msa")


@contextmanager
def on_host(sample: batches.Batch, device: torch.device) -> Iterator[batches.Batch]:
    """Yields `sample`, which is on the CPU, on `device`; the alignment of steps on it inside the block works on the CPU.

    What is yielded lacks the permutations, some hundred small tensors that nothing but the alignment reads.
    """
    from openfold3.core.utils.tensor_utils import tensor_tree_map
    from openfold3.projects.of3_all_atom import model as owner

    original = owner.safe_multi_chain_permutation_alignment

    def align(batch: Any, atom_positions_predicted: torch.Tensor) -> None:
        # the model has given every feature a dimension for samples
        here = tensor_tree_map(lambda t: t.unsqueeze(1), {k: v for k, v in moved.items() if not k.startswith(_NOT_READ)})
        before = dict(here["ground_truth"])
        original({**here, _PERMUTATIONS: sample[_PERMUTATIONS]}, atom_positions_predicted.cpu())
        changed = {key: value for key, value in here["ground_truth"].items() if value is not before.get(key)}
        batch["ground_truth"].update(batches.copy(changed, atom_positions_predicted.device))

    moved = {key: value for key, value in sample.items() if key != _PERMUTATIONS}
    owner.safe_multi_chain_permutation_alignment = align
    try:
        yield batches.copy(moved, device)
    finally:
        owner.safe_multi_chain_permutation_alignment = original
