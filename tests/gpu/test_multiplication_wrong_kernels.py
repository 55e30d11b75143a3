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

FILES = ("common_kernels", "input_kernels", "output_kernels", "gradient_kernels", "weight_kernels")

# Two full tiles of 64 columns and one of 2; rows padded by 6 columns. Both halves of 64 channels.
CASE = Case(n=130, channels=128, weights="fp32")
# Sums of two terms, so that what six columns of padding would add stands out.
SHORT = Case(n=2, channels=128, batch=(64,), mask="none", weights="fp32")


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
        "common_kernels", "    if HAS_MASK:  # noqa: SIM108", "    if False:  # noqa: SIM108", ("input_forward", "input_backward"), "out"
    ),
    "mask dropped in the backward": Mutant(
        "input_kernels", "df = df * keep[None, :]", "df = df * 1.0", ("input_backward",), "da_p"
    ),
    "gate and value swapped": Mutant(
        "input_kernels", "value = p * sigmoid(g)", "value = g * sigmoid(p)", ("input_forward",), "out"
    ),
    "output gate and value swapped": Mutant(
        "output_kernels", "(y * sigmoid(g))", "(g * sigmoid(y))", ("output_forward",), "out"
    ),
    "sigmoid without its derivative": Mutant(
        "input_kernels", "(ds * p * (1.0 - s))", "(ds * p)", ("input_backward",), "da_g"
    ),
    "output gate without its derivative": Mutant(
        "output_kernels", "(ds * y * (1.0 - s))", "(ds * y)", ("output_backward",), "dgate"
    ),
    "no gradient through the mean of LN(z)": Mutant(
        "common_kernels", "offset = total * rstd * (1.0 / C) - mean * slope", "offset = 0.0 - mean * slope", ("input_backward",), "dz"
    ),
    "no gradient through the mean of LN(x)": Mutant(
        "common_kernels", "offset = total * rstd * (1.0 / C) - mean * slope", "offset = 0.0 - mean * slope", ("output_backward",), "dz"
    ),
    "no gradient through the deviation of LN(z)": Mutant(
        "common_kernels", "slope = (slope - mean * total)", "slope = 0.0 * (slope - mean * total)", ("input_backward",), "dz"
    ),
    "one step of 16 channels skipped in the projections": Mutant(
        "common_kernels",
        "CP, CP, CP, LAYOUT)))",
        "CP, CP, CP, LAYOUT), mask=row_guard(CP, CP - 16, CP, CP, LAYOUT), other=0.0))",
        ("input_forward",),
        "out",
    ),
    "gates' share of dz skipped": Mutant(
        "input_kernels", "    dzn = warpgroup_mma(sg.permute((1, 0)), wg, dzn, is_async=True)\n", "", ("input_backward",), "dz"
    ),
    "second half of the channels computed as the first": Mutant(
        "input_kernels",
        "wp, wg = w_p.slice(PART * SIZE, SIZE, 0), w_g.slice(PART * SIZE, SIZE, 0)",
        "wp, wg = w_p.slice(0, SIZE, 0), w_g.slice(0, SIZE, 0)",
        ("input_backward",),
        "da_p",
    ),
    "last column of z not read": Mutant(
        "input_kernels",
        "x = gl.load(row_tile(z + place * 8, z_column8 * 8, CP, BM, ROWS), mask=row_guard(n - first, ",
        "x = gl.load(row_tile(z + place * 8, z_column8 * 8, CP, BM, ROWS), mask=row_guard(n - first - 1, ",
        ("input_forward",),
        "out",
    ),
    "operands beyond column n not zero": Mutant("input_kernels", "if n - first < BM:", "if n < 0:", ("input_forward",), "out", SHORT),
    "last column of out lost": Mutant(
        "output_kernels",
        "        zn.store((y * sigmoid(g)).to(gl.bfloat16))",
        "        zn.store(gl.where(row_guard(n - first - 1, CP, CP, BM, PRODUCT), y * sigmoid(g), 0.0).to(gl.bfloat16))",
        ("output_forward",),
        "out",
    ),
    "last column of each row left out of a weight gradient": Mutant(
        "gradient_kernels", "row_guard((n - first) * exists", "row_guard((n - first - 1) * exists", ("weight_gradients",), "dgate"
    ),
    "last tile of each CTA left out of the weight gradients": Mutant(
        "gradient_kernels", "in range(start, tiles, step):", "in range(start, tiles - step, step):", ("weight_gradients",), "da_p"
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


@pytest.mark.parametrize("case", [CASE, SHORT], ids=str)
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
