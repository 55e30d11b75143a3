"""Triangle-attention inputs and output gradients recorded in OpenFold3's own model (`data/captured.npz`), as input family `openfold`.

The record: forward and backward of OpenFold3's `OpenFold3AllAtom` on a real batch, under bf16 autocast as in training, one
recycle, one or two blocks a stack, random weights with zero-initialised gates and output projections filled. Remake it with

    python -m pipeline.openfold.capture --out pipeline/openfold/data/captured.npz

(needs openfold3, about 15 GB of memory, and a quarter of an hour on one CPU core). Reading it needs numpy and torch only.
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.implementations import Unsupported
from pipeline.openfold import batches, model, ranks
from pipeline.openfold.sites import Recorded, recording
from pipeline.openfold.step import TrainingStep

FILE = Path(__file__).parent / "data" / "captured.npz"
TENSORS = ("q", "k", "v", "dout")
# tiled slices are shifted by multiples of this many tokens; odd, so that a long tiling visits every shift
_SHIFT = 37


@dataclass(frozen=True)
class Site:
    """One recorded site: the batch and module it is from, and its sizes.

    The recorded gradient was multiplied by 2**`dout_exponent`. `rows` are the slices of the pair representation that were kept.
    """

    name: str
    batch: str
    module: str
    ending: bool
    head_dim: int
    heads: int
    tokens: int
    rows: tuple[int, ...]
    padded: bool
    dout_exponent: int


def sites() -> list[Site]:
    """What was recorded."""
    return [site for site, _ in _stored().values()]


def load(n: int, slices: int, heads: int, head_dim: int, seed: int, padded: bool | None = None) -> dict[str, Any]:
    """Captured inputs at the sizes asked for: the same arguments give the same bits on every machine.

    Returns q, k, v, dout [slices, n, heads, head_dim] bf16, bias [heads, n, n] bf16, mask [slices, n] bool (True = attend;
    OpenFold3 always passes one, here all True where no token is padded), scale (float) and site (str, the name of the Site).

    `seed` picks the site (among those with or without padded tokens, if `padded` says which), then the window of n tokens,
    the slices and the heads. dout is the recorded gradient times a power of two (`Site.dout_exponent`): the recorded one is
    below 1e-9, because the weights are untrained and the loss is a mean over the whole structure.

    More than was recorded is made by tiling. Tokens: q, k, v, dout, mask and both sides of the bias repeat with the period of
    the recorded tokens. Slices: each further round of the recorded slices is shifted by 37 tokens more against the bias, so
    that no two slices are equal and rounding errors do not add up coherently over the slices.

    Raises Unsupported for a head dimension that was not recorded, or for more heads than were: no later run finds them.
    """
    chosen = [s for s in sites() if s.head_dim == head_dim and (padded is None or s.padded == padded)]
    if not chosen:
        dims = sorted({s.head_dim for s in sites()})
        raise Unsupported(f"inputs of the openfold family were recorded with head dimension {' and '.join(map(str, dims))}, not {head_dim}")
    if n < 1 or slices < 1:
        raise ValueError(f"at least one token and one slice are needed; asked for n={n}, slices={slices}")
    generator = torch.Generator().manual_seed(seed)
    site, arrays = _stored()[chosen[seed % len(chosen)].name]
    if not 1 <= heads <= site.heads:
        raise Unsupported(f"inputs of the openfold family were recorded with {site.heads} heads, not {heads}")
    tokens = _window(site, arrays["mask"], n, generator)
    rows = torch.randperm(len(site.rows), generator=generator)
    head_order = torch.randperm(site.heads, generator=generator)[:heads]

    def gather(array: torch.Tensor) -> torch.Tensor:
        """[slices, n, ...] of a recorded [rows, tokens, ...] array."""
        out = []
        for index in range(slices):
            turn, position = divmod(index, len(rows))
            out.append(array[rows[position], (tokens + turn * _SHIFT) % site.tokens])
        return torch.stack(out)

    loaded: dict[str, Any] = {name: gather(arrays[name])[:, :, head_order].contiguous() for name in TENSORS}
    bias = arrays["bias"][head_order][:, tokens][:, :, tokens].contiguous()
    return {**loaded, "bias": bias, "mask": gather(arrays["mask"]), "scale": head_dim**-0.5, "site": site.name}


def _window(site: Site, mask: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor:
    """Indices of n neighbouring tokens; where the site has padded tokens, at most half of a window shorter than all are padded."""
    if n >= site.tokens:
        return torch.arange(n) % site.tokens
    real = int(mask.any(0).sum())  # padded tokens come last
    last = min(site.tokens - n, real - (n + 1) // 2)
    start = int(torch.randint(last + 1, (), generator=generator))
    return torch.arange(start, start + n)


@cache
def _stored() -> dict[str, tuple[Site, dict[str, torch.Tensor]]]:
    with np.load(FILE) as file:
        index = json.loads(file["index"].tobytes().decode())
        found = {}
        for entry in index:
            site = Site(**{**entry, "rows": tuple(entry["rows"])})
            arrays = {name: _from_bits(file[f"{site.name}/{name}"]) for name in (*TENSORS, "bias")}
            arrays["mask"] = torch.from_numpy(file[f"{site.name}/mask"])
            found[site.name] = site, arrays
    return found


# which block is recorded, and which node a site attends from; a reduced model has two pairformer blocks and one of the others
_MODULES = {
    "pairformer": "pairformer_stack.blocks.1.pair_stack.tri_att_",
    "msa": "msa_module.blocks.0.pair_stack.tri_att_",
    "template": "template_embedder.template_pair_stack.blocks.0.tri_att_",
}
# sites stored in the repository: each stack, starting and ending node, with and without padded tokens, within about 8 MB
STORED = {
    "1y57_384": ("pairformer_start", "msa_end", "template_end"),
    "2q2k_384": ("pairformer_end", "template_start"),
}


def record(batch_name: str, tokens: int | None = None, seed: int = 0) -> dict[str, Recorded]:
    """All sites `<stack>_start` and `<stack>_end` recorded in one optimizer step of the reduced model on a stored batch, on the CPU.

    `tokens` crops the batch first. Needs openfold3.
    """
    model.require()
    module = model.build(model.configure(model.find_backend("pytorch"), "reduced", seed=seed), seed)
    model.fix_recycles(module.model, 1)
    batch = batches.read(batch_name)
    if tokens is not None:
        batch = batches.crop(batch, tokens, seed)
    wanted = {f"{stack}_{node}": path + node for stack, path in _MODULES.items() for node in ("start", "end")}
    model.seed_rank(seed, 0)
    with recording(module.model, wanted) as records:
        TrainingStep(module, batch, ranks.Ranks(0, 1, torch.device("cpu")))()
    return records


def write(path: Path, recorded: dict[str, dict[str, Recorded]], slices: int) -> list[Site]:
    """Store `recorded` (batch -> site -> what was recorded) with `slices` evenly spaced slices of each site; returns the index.

    Raises ValueError if a gradient is missing or zero everywhere: then nothing about a kernel's backward could be told from it.
    """
    index: list[Site] = []
    arrays: dict[str, np.ndarray] = {}
    for batch_name, found in recorded.items():
        for site_name, r in found.items():
            if r.dout is None or not r.dout.any():
                raise ValueError(f"no gradient reached {site_name} on {batch_name}; were the zero-initialised gates filled?")
            tokens, _, heads, head_dim = r.q.shape
            rows = tuple(int((i + 0.5) * tokens / slices) for i in range(slices))
            # the power of two which brings the root mean square of the gradient into [1, 2)
            exponent = -math.floor(math.log2(float(r.dout.double().square().mean().sqrt())))
            stack, node = site_name.rsplit("_", 1)
            site = Site(
                name=f"{batch_name}_{site_name}",
                batch=batch_name,
                module=_MODULES[stack] + node,
                ending=node == "end",
                head_dim=head_dim,
                heads=heads,
                tokens=tokens,
                rows=rows,
                padded=not bool(r.mask.all()),
                dout_exponent=exponent,
            )
            index.append(site)
            arrays |= {f"{site.name}/{name}": _to_bits(getattr(r, name)[list(rows)]) for name in ("q", "k", "v")}
            arrays[f"{site.name}/dout"] = _to_bits(torch.ldexp(r.dout[list(rows)], torch.tensor(exponent)))
            arrays[f"{site.name}/bias"] = _to_bits(r.bias)
            arrays[f"{site.name}/mask"] = r.mask[list(rows)].numpy()
    arrays["index"] = np.frombuffer(json.dumps([asdict(site) for site in index]).encode(), np.uint8)
    np.savez_compressed(path, allow_pickle=False, **arrays)
    return index


# bf16 as two planes of bytes, sign and exponent apart from the mantissa: the first plane compresses well
def _to_bits(tensor: torch.Tensor) -> np.ndarray:
    bits = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    return np.stack([(bits >> 7).astype(np.uint8), ((bits & 0x7F) | ((bits >> 15) << 7)).astype(np.uint8)])


def _from_bits(planes: np.ndarray) -> torch.Tensor:
    high, low = planes.astype(np.uint16)
    bits = ((high & 0xFF) << 7) | (low & 0x7F) | ((low >> 7) << 15)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def main() -> None:
    """Record the stored sites and write them to a file."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.openfold.capture", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write (.npz)")
    parser.add_argument("--slices", type=int, default=4, help="slices of the pair representation kept at each site")
    parser.add_argument("--tokens", type=int, default=None, help="crop each batch to this many tokens first")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, noise and crop")
    options = parser.parse_args()
    recorded = {}
    for batch_name, site_names in STORED.items():
        records = record(batch_name, options.tokens, options.seed)
        recorded[batch_name] = {name: records[name] for name in site_names}
        print(f"recorded {', '.join(site_names)} on {batch_name}", flush=True)
    for site in write(options.out, recorded, options.slices):
        print(f"{site.name}: {len(site.rows)} slices, N = {site.tokens}, D = {site.head_dim}, gradient times 2**{site.dout_exponent}")
    print(f"wrote {options.out}, {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
