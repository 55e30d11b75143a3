import sys
import types

import pytest
import torch
from small_cells import make_cell

from pipeline import inputs
from pipeline.inputs import Case, make

TINY = {"n": 5, "slices": 3, "heads": 2, "head_dim": 4, "seed": 1}

# The bits are part of the contract: records of two machines are compared only because their inputs are the same.
GOLDEN = {
    "normal": "73b1e376b2625a52",
    "peaked": "f3e98fb2f85ffe41",
    "sharp": "f6a55e9b272b3c10",
    "offset": "4103031c5501923e",
    "masked": "50c66ece9e49996f",
}


@pytest.mark.parametrize("family", GOLDEN)
def test_the_bits_of_a_tiny_case_never_change(family: str) -> None:
    assert make(Case(**TINY, family=family)).checksum()[:16] == GOLDEN[family]


def test_shapes_dtypes_and_scale() -> None:
    made = make(make_cell(n=7, slices=5, heads=3, head_dim=8, bias_dtype="fp32", masked=True))
    assert {tuple(getattr(made, name).shape) for name in ("q", "k", "v", "dout")} == {(5, 7, 3, 8)}
    assert made.bias.shape == (3, 7, 7) and made.bias.dtype == torch.float32
    assert made.q.dtype == torch.bfloat16 and made.mask is not None and made.mask.shape == (5, 7)
    assert made.scale == 8**-0.5
    assert make(make_cell(dtype="fp32")).q.dtype == torch.float32


def test_the_number_of_threads_does_not_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(n=4, slices=100, heads=1, head_dim=8)  # several blocks
    parallel = make(case).checksum()
    monkeypatch.setattr(inputs.torch, "get_num_threads", lambda: 7)
    assert make(case).checksum() == parallel


def test_blocks_seeds_and_tensors_are_independent_draws() -> None:
    made = make(Case(n=4, slices=64, heads=1, head_dim=8, seed=0))
    assert not torch.equal(made.q[:32], made.q[32:])
    assert not torch.equal(made.q, made.k)
    assert not torch.equal(made.q, make(Case(n=4, slices=64, heads=1, head_dim=8, seed=1)).q)


def test_draws_are_standard_normal() -> None:
    q = make(Case(n=64, slices=64, heads=2, head_dim=16)).q.double()
    assert abs(float(q.mean())) < 0.01 and abs(float(q.std()) - 1) < 0.01
    assert abs(float((q.abs() < 1).double().mean()) - 0.6827) < 0.01


def test_families_share_their_draws() -> None:
    normal, peaked, sharp, offset = (make(Case(**TINY, family=family)) for family in ("normal", "peaked", "sharp", "offset"))
    assert torch.equal(peaked.bias, 4 * normal.bias)  # a power of two: exact in bf16
    assert torch.equal(peaked.q, normal.q) and torch.equal(sharp.bias, normal.bias)
    torch.testing.assert_close(sharp.q.float(), 3 * normal.q.float(), rtol=2**-7, atol=0)
    torch.testing.assert_close(offset.v.float(), normal.v.float() + 1, rtol=2**-7, atol=2**-7)


def test_both_bias_dtypes_hold_the_same_values() -> None:
    low, high = (make(Case(**TINY, bias_dtype=dtype)) for dtype in ("bf16", "fp32"))
    assert torch.equal(low.bias.float(), high.bias)


@pytest.mark.parametrize("fields", [{"family": "masked"}, {"family": "sharp", "masked": True}])
def test_padding(fields: dict[str, object]) -> None:
    made = make(Case(n=40, slices=24, heads=1, head_dim=4, **fields))
    assert made.mask is not None
    assert made.mask[:21, :35].all() and not made.mask[:, 35:].any()  # an eighth of the keys
    dead = ~made.mask.any(dim=1)
    assert dead.tolist() == [False] * 21 + [True] * 3  # an eighth of the slices is fully masked
    assert (made.dout[dead] == 0).all() and (made.dout[~dead] != 0).any()


def test_smallest_case_still_has_a_dead_slice_and_a_live_one() -> None:
    mask = inputs.padding_mask(2, 2)
    assert mask.tolist() == [[True, False], [False, False]]


def test_bad_cases_are_named() -> None:
    with pytest.raises(ValueError, match="family is 'gaussian'; accepted are normal"):
        Case(n=4, slices=4, heads=1, head_dim=4, family="gaussian")
    with pytest.raises(ValueError, match="head_dim is 0"):
        Case(n=4, slices=4, heads=1, head_dim=0)


def capture_module(**changes: torch.Tensor) -> types.ModuleType:
    module = types.ModuleType("pipeline.openfold.capture")

    def load(n: int, slices: int, heads: int, head_dim: int, seed: int, padded: bool | None = None) -> dict[str, object]:
        generator = torch.Generator().manual_seed(seed)
        data: dict[str, object] = {
            name: torch.randn(slices, n, heads, head_dim, generator=generator).bfloat16() for name in ("q", "k", "v", "dout")
        }
        mask = torch.ones(slices, n, dtype=torch.bool)
        mask[-1] = False
        return {**data, "bias": torch.randn(heads, n, n, generator=generator).bfloat16(), "mask": mask, **changes}

    module.load = load
    return module


def use_capture(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> None:
    package = types.ModuleType("pipeline.openfold")
    if module is not None:
        package.capture = module
    monkeypatch.setitem(sys.modules, "pipeline.openfold", package)
    monkeypatch.delitem(sys.modules, "pipeline.openfold.capture", raising=False)


def test_openfold_family_comes_from_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    use_capture(monkeypatch, capture_module())
    made = make(make_cell(family="openfold", bias_dtype="fp32"))
    assert made.bias.dtype == torch.float32 and made.mask is not None
    assert (made.dout[-1] == 0).all() and (made.dout[:-1] != 0).any()


def test_openfold_family_without_usable_capture_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use_capture(monkeypatch, None)
    with pytest.raises(RuntimeError, match=r"needs pipeline\.openfold\.capture"):
        make(make_cell(family="openfold"))
    use_capture(monkeypatch, capture_module(q=torch.zeros(1, 2, 3, 4)))
    with pytest.raises(RuntimeError, match=r"captured q is \(1, 2, 3, 4\)"):
        make(make_cell(family="openfold"))


@pytest.mark.parametrize("masked", [False, True])
def test_captured_inputs(masked: bool) -> None:
    case = Case(n=48, slices=8, heads=4, head_dim=32, family="openfold", seed=2, masked=masked)
    made = make(case)
    assert made.checksum() == make(case).checksum()
    assert made.q.dtype == torch.bfloat16 and made.mask is not None
    assert all(float(getattr(made, name).float().square().mean()) > 0 for name in ("q", "k", "v", "bias", "dout"))
    if masked:
        assert not made.mask.all(), "a batch with padded tokens was asked for"
