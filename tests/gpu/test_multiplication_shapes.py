"""Triangle multiplication against FP64: every length, every size and kind the contract names."""

import pytest
import torch
from torch.nn.functional import layer_norm

import turbopair
from tests.gpu import checks
from tests.gpu.multiplication import assert_accurate, operator
from tests.support import multiplication, numerics
from tests.support.multiplication import Case

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
DIRECTIONS = ("outgoing", "incoming")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_length_up_to_140(hopper: torch.device, direction: str, record_property: checks.Record) -> None:
    """All residues modulo the tile and the pitch, forward and backward, with and without a mask."""
    failures = []
    for n in range(1, 141):
        case = Case(
            n=n,
            channels=(64, 128)[n % 3 == 0],
            batch=(16,) if n < 12 else (1,),  # enough elements for an RMSE to mean something
            mask=("none", "bool")[n % 2],
            weights=("fp32", "bf16")[n % 5 == 0],
            direction=direction,
            seed=n,
        )
        failures += [f"{case}: {problem}" for problem in multiplication.compare(turbopair.triangle_multiplication, case, hopper)]
    assert not failures, f"{len(failures)} problems: " + "; ".join(failures[:20])
    record_property("count.multiplication_lengths", 140)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("n", [191, 192, 193, 255, 256, 257, 384, 500, 511, 512, 513, 640])
def test_long(hopper: torch.device, n: int, direction: str) -> None:
    assert_accurate(Case(n=n, channels=64, mask=("none", "bool")[n % 2], weights="fp32", direction=direction, seed=n), hopper)


@pytest.mark.parametrize(
    "n,channels,direction", [(768, 128, "outgoing"), (777, 64, "incoming"), (1000, 64, "outgoing"), (1024, 64, "incoming")]
)
def test_longer(hopper: torch.device, n: int, channels: int, direction: str, record_property: checks.Record) -> None:
    """Here the gold is the package's own FP64 reference, whose memory is bounded, and the error is given as such."""
    data = multiplication.inputs(Case(n=n, channels=channels, mask="none", weights="fp32", direction=direction), hopper)
    result = operator(data)
    gold = _reference(data)
    for name, value in result.items():
        want = gold[name].reshape(value.shape)
        floor = numerics.rmse(want.to(value.dtype), want)
        relative = numerics.rmse(value, want) / want.square().mean().sqrt().item()
        record_property(f"max.multiplication_rmse.{name}.n{n}", numerics.rmse(value, want))
        assert relative < 8e-3, f"{name}: relative RMSE {relative:.2e} (rounding alone: RMSE {floor:.2e})"


@pytest.mark.parametrize("weights", ["fp32", "bf16", "mixed"])
@pytest.mark.parametrize("mask", ["none", "bool", "padded", "float"])
@pytest.mark.parametrize("channels", [32, 64, 96, 128])
def test_channels_masks_and_weights(hopper: torch.device, channels: int, mask: str, weights: str) -> None:
    for n, direction in ((50, "outgoing"), (72, "incoming")):
        assert_accurate(Case(n=n, channels=channels, mask=mask, weights=weights, direction=direction), hopper)


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("channels", [32, 128])
def test_fp32(hopper: torch.device, channels: int, mask: str) -> None:
    for n, direction in ((40, "outgoing"), (33, "incoming")):
        assert_accurate(Case(n=n, channels=channels, dtype=FP32, mask=mask, direction=direction), hopper)


def test_fp32_mask_beside_bf16_z(hopper: torch.device) -> None:
    assert_accurate(Case(n=60, channels=128, mask="float"), hopper, lambda data: {**data, "mask": data["mask"].float()})


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 2)])
def test_batch_prefixes(hopper: torch.device, batch: tuple[int, ...], direction: str) -> None:
    """Also as the template stack has them: several templates of C = 64."""
    assert_accurate(Case(n=45, channels=64, batch=batch, mask="bool", weights="fp32", direction=direction), hopper)


def test_mask_shared_by_a_batch(hopper: torch.device) -> None:
    """A mask of batch size 1 beside four templates."""

    def share(data: multiplication.Data) -> multiplication.Data:
        return {**data, "mask": data["mask"][:1]}

    assert_accurate(Case(n=40, channels=64, batch=(4,), mask="bool", weights="fp32"), hopper, share)


def test_offsets_beyond_32_bits(hopper: torch.device) -> None:
    """N = 4096, C = 128: 2^31 elements. The last row of the output, and all gradients finite and not zero at the end."""
    if torch.cuda.mem_get_info()[1] < 120 * 2**30:
        pytest.skip("needs 120 GiB of GPU memory")
    n, c = 4096, 128
    z = torch.randn(1, n, n, c, device=hopper, dtype=BF16).requires_grad_()
    weights = multiplication.inputs(Case(n=1, channels=c, weights="fp32"), hopper)["weights"]
    out = turbopair.triangle_multiplication(z, None, weights, "outgoing")
    w = turbopair.TriangleMultiplicationWeights(*(weight.float() for weight in weights))

    def operands(rows: torch.Tensor, p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        zn = layer_norm(rows.float(), (c,), w.norm_in_weight, w.norm_in_bias)
        return torch.sigmoid(zn @ g.T) * (zn @ p.T)

    with torch.no_grad():
        a = operands(z[0, -1], w.a_p, w.a_g)
        x = torch.cat([torch.einsum("kc,jkc->jc", a, operands(z[0, j : j + 32], w.b_p, w.b_g)) for j in range(0, n, 32)])
        zn = layer_norm(z[0, -1].float(), (c,), w.norm_in_weight, w.norm_in_bias)
        want = torch.sigmoid(zn @ w.gate.T) * (layer_norm(x, (c,), w.norm_out_weight, w.norm_out_bias) @ w.out.T)
        error = numerics.rmse(out[0, -1], want) / want.square().mean().sqrt().item()
    assert error < 8e-3, f"last row: relative RMSE {error:.2e}"
    out.backward(torch.ones((), device=hopper, dtype=BF16).expand_as(out))
    tail = z.grad[0, -1, -64:].float()
    assert z.grad.isfinite().all() and tail.square().mean() > 0


def test_empty_batch(hopper: torch.device) -> None:
    data = multiplication.inputs(Case(n=20, channels=64, weights="fp32", mask="none"), hopper)
    data |= {"z": data["z"][:0], "dout": data["dout"][:0]}
    result = operator(data)
    assert result["out"].shape == data["z"].shape
    assert not any(result[f"d{name}"].any() for name in multiplication.WEIGHTS)


def _reference(data: multiplication.Data) -> dict[str, torch.Tensor]:
    from turbopair.triangle_multiplication.reference import reference

    return reference(data["z"], data["mask"], data["weights"], data["direction"], 1e-5, data["dout"])
