"""The suite's own comparison fails for triangle multiplications whose kernels are wrong.

A mutant is the kernels' source with one passage changed: a copy of the package's kernel files that is compiled and called in the place of
the right kernels. What a mutant needs not, it shares with them. Where the launches and the product are, in `cuda.py`, a function is
replaced. Each is compared by what the other tests are compared by, on inputs on which the right kernels pass.
"""

import copy
import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.gpu.multiplication import Results, assert_same_bits, operator
from tests.support import multiplication
from tests.support.multiplication import TENSORS, Case

pytestmark = pytest.mark.gpu

FILES = ("tile_kernels", "input_kernels", "output_kernels", "gradient_kernels", "weight_kernels")

# Two full tiles of 64 columns and one of 2; rows padded by 6 columns. Both halves of 64 channels.
CASE = Case(n=130, channels=128, weights="fp32")
# Sums of two terms, so that what six columns of padding would add stands out.
SHORT = Case(n=2, channels=128, batch=(64,), mask="none", weights="fp32")
# 1056 tiles: more than one for each stream, of which the forward has three a multiprocessor.
LONG = Case(n=66, channels=128, batch=(8,), weights="fp32")


class Mutant(NamedTuple):
    """A passage of a file, its replacement, the kernels which are compiled from the changed file, and a tensor that must be found wrong."""

    file: str
    old: str
    new: str
    kernels: tuple[str, ...]
    wrong: str
    case: Case = CASE


MUTANTS = {
    "mask dropped": Mutant(
        "tile_kernels",
        "gl.load(mask + place + j.to(gl.int64) * mask_column, mask=j < n, other=0).to(",
        "(j < n).to(",
        ("input_forward", "input_backward"),
        "out",
    ),
    "mask dropped in the backward": Mutant(
        "input_kernels", "ds = ds * keep[:, None]", "ds = ds * 1.0", ("input_backward",), "da_p"
    ),
    "gate and value swapped": Mutant(
        "input_kernels", "value = p * sigmoid(g)", "value = g * sigmoid(p)", ("input_forward",), "out"
    ),
    "output gate and value swapped": Mutant(
        "output_kernels", "(y * sigmoid(g))", "(g * sigmoid(y))", ("output_forward",), "out"
    ),
    "sigmoids that share a reciprocal swapped": Mutant(
        "tile_kernels",
        "mul.ftz.f32 $0, r, q;\n        mul.ftz.f32 $1, r, p;",
        "mul.ftz.f32 $0, r, p;\n        mul.ftz.f32 $1, r, q;",
        ("output_forward",),
        "out",
    ),
    "sigmoid without its derivative": Mutant(
        "input_kernels", "(ds * p * (1.0 - s))", "(ds * p)", ("input_backward",), "da_g"
    ),
    "output gate without its derivative": Mutant(
        "output_kernels", "(ds * y * (1.0 - s))", "(ds * y)", ("output_backward",), "dgate"
    ),
    "no gradient through the mean of LN(z)": Mutant(
        "tile_kernels", "offset = total * rstd * (1.0 / C) - mean * slope", "offset = 0.0 - mean * slope", ("input_backward",), "dz"
    ),
    "no gradient through the mean of LN(x)": Mutant(
        "tile_kernels", "offset = total * rstd * (1.0 / C) - mean * slope", "offset = 0.0 - mean * slope", ("output_backward",), "dz"
    ),
    "no gradient through the deviation of LN(z)": Mutant(
        "tile_kernels", "slope = (slope - mean * total)", "slope = 0.0 * (slope - mean * total)", ("input_backward",), "dz"
    ),
    "one step of 16 channels skipped in the projections": Mutant(
        "input_kernels",
        "left = affine(unit, norm_weight, norm_bias)",
        "left = gl.where((gl.arange(0, CP, layout=gl.SliceLayout(0, LEFT)) < CP - 16)[None, :], affine(unit, norm_weight, norm_bias), 0.0)",
        ("input_forward",),
        "out",
    ),
    "gates' share of dz skipped": Mutant(
        "input_kernels",
        "            dzn = warpgroup_mma(gl.convert_layout(d_g, left_layout(CP)), w_g, dzn, is_async=True)\n",
        "",
        ("input_backward",),
        "dz",
    ),
    "gate's matrix transposed": Mutant(
        "input_kernels", "w.index(at + 4), dzn", "w.index(at + 4).permute((1, 0)), dzn", ("input_backward",), "dz"
    ),
    "sum over halves of the channels begun anew": Mutant(
        "output_kernels", "dunit, use_acc=part > 0", "dunit, use_acc=False", ("output_backward",), "dz"
    ),
    "every part of the channels computed as the first": Mutant(
        "input_kernels",
        "_weights(w, at, PART, PARTS, SIZE)",
        "_weights(w, at, PART // PARTS * PARTS, PARTS, SIZE)",
        ("input_backward",),
        "da_p",
    ),
    "matrices copied from one further": Mutant(
        "tile_kernels", "[(FIRST + index) * CP, 0]", "[(FIRST + index + 1) * CP, 0]", ("output_forward",), "out"
    ),
    "first tile of each stream copied from one further": Mutant(
        "output_kernels",
        "out.layout)\n    batch, row, first = tile_place(start, ",
        "out.layout)\n    batch, row, first = tile_place(start + 1, ",
        ("output_forward",),
        "out",
    ),
    "tile of z copied again in the place of the next": Mutant(
        "input_kernels",
        "later = tile + step\n        batch_, row_, first_ = tile_place(later, tiles_per_row, n)\n        fetch(",
        "later = tile + step\n        batch_, row_, first_ = tile_place(tile, tiles_per_row, n)\n        fetch(",
        ("input_forward",),
        "out",
        LONG,
    ),
    "second part of db skipped": Mutant(
        "input_kernels", "(part + 2 - PARTS) * SIZE, first]", "(part + 3 - PARTS) * SIZE, first]", ("input_backward",), "db_p"
    ),
    "x read from the other buffer": Mutant(
        "output_kernels", "raw = landings_x.index(stage)", "raw = landings_x.index(1 - stage)", ("output_backward",), "dz"
    ),
    "tile stored transposed": Mutant(
        "input_kernels",
        "leaving.reshape([64, BM]).permute((1, 0)).store(value)",
        "leaving.reshape([64, BM]).store(value)",
        ("input_forward",),
        "out",
    ),
    "halves of dz swapped": Mutant("tile_kernels", "low, high = gl.split", "high, low = gl.split", ("input_backward",), "dz"),
    "second half of dz stored over the first": Mutant(
        "input_kernels", "[line, first, 64], leaving_z", "[line, first, 0], leaving_z", ("input_backward",), "dz"
    ),
    "last column of z not read": Mutant(
        "input_kernels",
        "x = landing.reshape([BM, CP]).load(LEFT)\n        later",
        "x = gl.where(inside(n - first - 1, gl.SliceLayout(1, LEFT))[:, None], landing.reshape([BM, CP]).load(LEFT), 0.0)\n        later",
        ("input_forward",),
        "out",
    ),
    "operands beyond column n not zero": Mutant("input_kernels", "if n - first < BM:", "if n < 0:", ("input_forward",), "out", SHORT),
    "last column of out lost": Mutant(
        "output_kernels",
        "value = (y * sigmoid(g))",
        "value = gl.where((gl.arange(0, BM, layout=gl.SliceLayout(1, sums_layout(64))) < n - first - 1)[:, None], y * sigmoid(g), 0.0)",
        ("output_forward",),
        "out",
    ),
    "last column of each row left out of the weight gradients": Mutant(
        "gradient_kernels", "(tile < tiles, n - first, 0)", "(tile < tiles, n - first - 1, 0)", ("weight_gradients",), "dgate"
    ),
    "last tile of each CTA left out of the weight gradients": Mutant(
        "gradient_kernels", "in range(start, tiles, step):", "in range(start, tiles - step, step):", ("weight_gradients",), "da_p"
    ),
    "one stage of the ring read for all": Mutant(
        "gradient_kernels", "right = su.index(stage)", "right = su.index(0)", ("weight_gradients",), "da_p"
    ),
    "statistics of the tile before": Mutant(
        "gradient_kernels", "statistics, tile + 3 * step", "statistics, tile + 2 * step", ("weight_gradients",), "dout"
    ),
    "statistics of z taken for those of x": Mutant(
        "gradient_kernels",
        "x_statistics = statistics + tiles // tiles_per_row * n.to(gl.int64) * 2",
        "x_statistics = statistics",
        ("weight_gradients",),
        "dout",
    ),
    "a partial sum of the projections dropped": Mutant(
        "weight_kernels", "count = wide_ctas\n", "count = wide_ctas - 1\n", ("reduce_matrices",), "da_p"
    ),
    "a partial sum of the gate dropped": Mutant(
        "weight_kernels", "count = narrow_ctas\n", "count = narrow_ctas - 1\n", ("reduce_matrices",), "dgate"
    ),
    "weight gradients without the LayerNorm's bias": Mutant(
        "weight_kernels", "gradient = g * weight + d * bias", "gradient = g * weight", ("reduce_matrices",), "da_p"
    ),
    "LayerNorms confused in the packed weights": Mutant(
        "weight_kernels", "tl.load(norm_out_weight + r", "tl.load(norm_in_weight + r", ("pack_weights",), "out"
    ),
    "one row's share of LN(x)'s gradient dropped": Mutant(
        "weight_kernels",
        "_ordered_sum(norm_partials + 5 * C * 2 * C + (which - 2) * C, C,",
        "_ordered_sum(norm_partials + 5 * C * 2 * C + (which - 2) * C, C - 1,",
        ("reduce_norms",),
        "dnorm_out_weight",
    ),
    "one matrix's share of LN(z)'s gradient dropped": Mutant(
        "weight_kernels", "norm_partials + which * C, 5 * C,", "norm_partials + which * C, 4 * C,", ("reduce_norms",), "dnorm_in_weight"
    ),
}  # fmt: skip


def compiled_from_copies(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kernels: tuple[str, ...], file: str = "", old: str = "", new: str = ""
) -> None:
    """Put kernels compiled from a copy of the sources, with a passage of one file replaced, in the place of the package's."""
    from turbopair.triangle_multiplication import cuda
    from turbopair.triangle_multiplication.launch_kernels import Kernel

    sources = Path(cuda.__file__).parent
    (folder / "__init__.py").touch()
    for name in FILES:
        text = (sources / f"{name}.py").read_text()
        if name == file:
            assert text.count(old) == 1, f"{name}.py has {old!r} {text.count(old)} times; the mutant needs it once"
            text = text.replace(old, new)
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder.parent)
    modules = [importlib.import_module(f"{folder.name}.{name}") for name in FILES[1:]]
    changed = copy.copy(cuda._kernels())
    for kernel in kernels:
        setattr(changed, kernel, Kernel(next(getattr(module, kernel) for module in modules if hasattr(module, kernel))))
    monkeypatch.setattr(cuda, "_kernels", lambda: changed)


def expect(found: list[str], wrong: str) -> None:
    """Fail unless the comparison found fault with the named tensor."""
    assert any(problem.split()[0].rstrip(":") == wrong and "says nothing" not in problem for problem in found), (
        f"the comparison finds nothing wrong in {wrong}: {found}"
    )


@pytest.mark.parametrize("case", [CASE, SHORT, LONG], ids=str)
def test_copies_of_the_kernels_are_right(hopper: torch.device, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases pass, and what makes a mutant wrong is its change alone: unchanged copies give the package's bits."""
    from turbopair.triangle_multiplication import cuda

    data = multiplication.inputs(case, hopper)
    right = operator(data)
    assert not multiplication.found(right, data)
    names = tuple(vars(cuda._kernels()))
    assert {kernel for mutant in MUTANTS.values() for kernel in mutant.kernels} == set(names)  # each has a mutant
    compiled_from_copies(tmp_path, monkeypatch, names)
    assert_same_bits(operator(data), right, "copies of the kernels")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_found(hopper: torch.device, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    data = multiplication.inputs(mutant.case, hopper)
    compiled_from_copies(tmp_path, monkeypatch, mutant.kernels, mutant.file, mutant.old, mutant.new)
    expect(multiplication.found(operator(data), data), mutant.wrong)


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_a_product_without_its_last_block_is_found(hopper: torch.device, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over k without what is behind the last full 64: 2 of 130 terms."""
    from turbopair.triangle_multiplication import cuda

    right = cuda._product

    def product(out: torch.Tensor, left: torch.Tensor, right_operand: torch.Tensor) -> None:
        right(out, left[..., :128], right_operand[..., :128, :])

    data = multiplication.inputs(dataclasses.replace(CASE, direction=direction), hopper)
    monkeypatch.setattr(cuda, "_product", product)
    found = multiplication.found(operator(data), data)
    expect(found, "out")
    expect(found, "dz")


@pytest.mark.parametrize("direction,wrong", [("outgoing", "dout"), ("incoming", "da_p")])
def test_padding_that_is_not_cleared_is_found(hopper: torch.device, direction: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns N to P as memory may hold them."""
    from turbopair.triangle_multiplication import cuda

    def leave(call: object, tensor: torch.Tensor) -> None:
        tensor[..., CASE.n :].fill_(torch.nan)

    data = multiplication.inputs(dataclasses.replace(CASE, direction=direction), hopper)
    monkeypatch.setattr(cuda._Call, "clear_padding", leave)
    expect(multiplication.found(operator(data), data), wrong)


def test_a_last_column_outside_the_boxes_is_found(hopper: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of z and dout that know of 129 columns of 130."""
    from turbopair.triangle_multiplication import cuda

    right = cuda._pairs
    monkeypatch.setattr(cuda, "_pairs", lambda shape, *others: right((*shape[:2], shape[2] - 1, shape[3]), *others))
    data = multiplication.inputs(CASE, hopper)
    found = multiplication.found(operator(data), data)
    expect(found, "out")
    expect(found, "dz")


def test_a_backward_in_the_other_direction_is_found(hopper: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from turbopair.triangle_multiplication import cuda

    right = cuda.backward
    monkeypatch.setattr(cuda, "backward", lambda *arguments: right(*arguments[:-2], not arguments[-2], arguments[-1]))
    data = multiplication.inputs(CASE, hopper)
    expect(multiplication.found(operator(data), data), "dz")


def _zero(result: Results, name: str) -> torch.Tensor:
    return torch.zeros_like(result[name])


def _scaled(result: Results, name: str) -> torch.Tensor:
    return result[name] * 1.05


def _tail_lost(result: Results, name: str) -> torch.Tensor:
    """The columns behind the last full tile never written."""
    value = result[name].clone()
    value[..., 128:, :] = 0
    return value


def _one_nan(result: Results, name: str) -> torch.Tensor:
    value = result[name].clone()
    value.flatten()[-1] = torch.nan
    return value


RESULTS: list[tuple[str, Callable[[Results, str], torch.Tensor]]] = [
    *((name, change) for name in TENSORS for change in (_zero, _scaled, _one_nan)),
    *((name, _tail_lost) for name in ("out", "dz")),
]


def test_a_wrong_result_is_found(hopper: torch.device) -> None:
    """Every tensor is compared, and closely."""
    data = multiplication.inputs(CASE, hopper)
    right = operator(data)
    for name, change in RESULTS:
        expect(multiplication.found({**right, name: change(right, name)}, data), name)
    swapped = {**right, "da_p": right["db_p"], "db_p": right["da_p"]}
    expect(multiplication.found(swapped, data), "da_p")


def test_ignored_arguments_are_found(hopper: torch.device) -> None:
    """Calls that are right for other arguments."""
    data = multiplication.inputs(CASE, hopper)
    weights = data["weights"]
    last = data["mask"].clone()
    last[..., -1] = ~last[..., -1]
    for change in (
        {"mask": None},
        {"mask": ~data["mask"]},
        {"mask": data["mask"].mT},
        {"mask": last},
        {"direction": "incoming"},
        {"z": data["z"].transpose(1, 2)},
        {"weights": weights._replace(a_p=weights.b_p, a_g=weights.b_g, b_p=weights.a_p, b_g=weights.a_g)},
        {"weights": weights._replace(norm_in_bias=0 * weights.norm_in_bias)},
        {"weights": weights._replace(norm_out_bias=0 * weights.norm_out_bias)},
    ):
        expect(multiplication.found(operator({**data, **change}), data), "out")
    expect(multiplication.found(operator(data, eps=0.1), data), "out")
