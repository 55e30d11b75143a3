"""Made-up records for the tests of everything after the records: plausible numbers, every kind of ending."""

import math
import random

from pipeline.cells import Cell
from pipeline.curves import encode
from pipeline.records import Record, Status

DIGEST = "a1b2c3d4e5f60718" * 4
H200 = {
    "device": "cuda",
    "gpu": {"name": "NVIDIA H200", "count": 1, "driver": "580.0", "power_limit_w": 700.0, "clocks_locked": False},
    "cpu": "Some Xeon", "cpu_count": 16, "threads": 8, "os": "Debian 12", "python": "3.12.3",
    "torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0",
    "git": {"commit": "0123456789abcdef", "dirty": False}, "tf32": False, "container_digest": None,
}  # fmt: skip
H100 = {**H200, "gpu": {**H200["gpu"], "name": "NVIDIA H100 80GB HBM3"}}
CPU = {**H200, "device": "cpu", "gpu": None, "cuda": None, "cpu": "Some Laptop CPU", "cpu_count": 2, "threads": 2}
TENSORS = ("out", "dq", "dk", "dv", "dbias")
# relative to the bf16 floor: dq, dk, dv, dbias
RATIOS = {
    "eager": (3.3, 3.4, 3.5, 4.6), "sdpa": (1.22, 1.22, 1.0, 1.7), "flex": (1.0, 1.0, 1.0, 1.0), "trifast": (1.65, 1.4, 1.33, 1.43),
    "openfold3_triton": (1.2, 1.2, 1.22, 1.35), "cuequivariance": (1.0, 1.0, 1.0, 0.2), "turbopair.plain": (1.9, 1.8, 1.0, 1.9),
    "turbopair.paper": (1.2, 1.0, 1.0, 1.05), "turbopair.split_p": (1.1, 1.0, 1.0, 1.02), "turbopair.exact": (1.0, 0.99, 1.0, 1.0),
}  # fmt: skip
TIMES = {
    "eager": (10.0, 18.5), "sdpa": (4.9, 12.6), "flex": (1.1, 4.2), "trifast": (1.96, 8.5), "openfold3_triton": (2.27, 13.2),
    "cuequivariance": (2.68, 12.7), "turbopair.plain": (1.0, 2.6), "turbopair.paper": (1.0, 2.7), "turbopair.exact": (1.1, 3.0),
}  # fmt: skip


#: of peers that tell theirs, in every record
VERSIONS = {"cuequivariance": "0.13.0", "trifast": "0.1.13"}


def cell(experiment, implementation, n=384, d=32, family="normal", seed=0, **more):
    fields = {"slices": n, "heads": 4, "masked": family in ("masked", "openfold")} | more
    return Cell(experiment=experiment, implementation=implementation, n=n, head_dim=d, family=family, seed=seed, **fields)


def record(
    of, metrics=None, status=Status.OK, reason=None, environment=H200, digest=DIGEST, version=None, finished="2026-11-30T10:00:00.000+00:00"
):
    return Record(
        cell=of, cell_id=of.id, status=status, reason=reason, metrics=metrics or {}, environment=environment, kernel_digest=digest,
        implementation_version=version, started=finished, finished=finished,
    )  # fmt: skip


def errors(ratios, floor=2.5e-4, dbias_floor=1e-3, dtype="bfloat16", noise=1.0, rms=0.1):
    """Metrics of an accuracy record with the given ratios to the floor (dq, dk, dv, dbias)."""
    metrics = {"dtype.dbias": dtype}
    for tensor, ratio in zip(TENSORS, (1.0, *ratios), strict=True):
        low = (dbias_floor if tensor == "dbias" else floor) * noise
        metrics |= {f"rmse.{tensor}": ratio * low, f"floor.{tensor}": low, f"ratio.{tensor}": ratio, f"ref_rms.{tensor}": rms}
        metrics |= {f"rel_rmse.{tensor}": ratio * low / rms, f"max_err.{tensor}": 6 * ratio * low}
    return metrics


def accuracy(name, n=384, d=32, family="normal", seed=0, *, experiment="accuracy", environment=H200, digest=DIGEST, **more):
    ratios = RATIOS[name]
    hard = {"normal": 1.0, "peaked": 1.3, "sharp": 2.0, "offset": 2.6, "masked": 1.0, "openfold": 0.8}[family]
    if not name.endswith("exact"):
        ratios = tuple(1 + (r - 1) * hard if r > 1 else r for r in ratios)
    noise = (1 + 0.01 * random.Random(seed).gauss(0, 1)) * math.sqrt(384 / n)
    metrics = errors(ratios, dtype="float32" if name == "cuequivariance" else "bfloat16", noise=noise)
    of = cell(experiment, name, n, d, family, seed, **more)
    return record(of, metrics, environment=environment, digest=digest, version=VERSIONS.get(name))


def determinism(name, n=384, d=32, family="normal", seed=0, *, differing=(), environment=H200, calls=5, digest=DIGEST, **more):
    metrics = {"calls": calls} | {f"bitwise.{t}": t not in differing for t in TENSORS}
    of = cell("determinism", name, n, d, family, seed, **more)
    return record(of, metrics, environment=environment, digest=digest, version=VERSIONS.get(name))


def timing(name, n=384, d=32, *, spread=0.02, environment=H200, digest=DIGEST, version=None, family="normal", seed=0, scale=1.0):
    forward, backward = (t * (n / 768) ** 3 * scale for t in TIMES[name])
    times = {"forward": forward, "forward_grad": 1.1 * forward, "backward": backward, "both": 1.1 * forward + backward}
    metrics = {"spread": spread, "unstable": spread > 0.05, "timer": "CUDA events", "warmup_iters": 80, "measured_iters": 50}
    for key, ms in times.items():
        metrics |= {f"ms.{key}": ms, f"ms.{key}.p10": ms * (1 - spread / 2), f"ms.{key}.p90": ms * (1 + spread / 2)}
    metrics |= {"peak_bytes.forward": n * n * 1000, "peak_bytes.both": n * n * 4000, "host_us.forward": 30.0, "host_us.backward": 55.0}
    of = cell("kernel_time", name, n, d, family, seed)
    return record(of, metrics, environment=environment, digest=digest, version=version or VERSIONS.get(name))


WEIGHTS = {
    "triangle_multiplication": (
        "norm_in_weight", "norm_in_bias", "a_p", "a_g", "b_p", "b_g", "norm_out_weight", "norm_out_bias", "out", "gate",
    ),
    "attention_module": ("norm_weight", "norm_bias", "q", "k", "v", "bias", "gate", "out"),
}  # fmt: skip
# of multiplication: ratio of out, dz and the worst weight to the floor; ms forward and backward at N = 768
PRODUCTS = {
    "eager": (3.6, 6.4, 7.0, 7.8, 23.5), "cuequivariance": (2.9, 5.4, 6.0, 0.8, 3.6), "turbopairformer": (2.9, 5.05, 5.5, 1.4, 2.9),
    "turbopair": (2.85, 5.0, 5.2, 0.65, 1.85),
}  # fmt: skip
MODULES = {
    "openfold3": (3.0, 5.0, 6.0, 13.0, 26.0), "cuequivariance": (2.5, 4.0, 4.5, 4.0, 17.0), "flex": (2.5, 4.0, 4.6, 2.0, 8.0),
    "turbopair": (2.4, 3.9, 4.2, 1.6, 6.0),
}  # fmt: skip


def pair_cell(experiment, implementation, operator="triangle_multiplication", n=384, family="normal", seed=0, **more):
    own = {"direction": "outgoing", "weight_dtype": "fp32"} if operator == "triangle_multiplication" else {"heads": 4, "head_dim": 32}
    fields = {"channels": 128, "masked": family == "masked"} | own | more
    return Cell(experiment=experiment, implementation=implementation, operator=operator, n=n, family=family, seed=seed, **fields)


def pair_accuracy(name, operator="triangle_multiplication", *, scale=1.0, worst="gate", **fields):
    out, dz, dw, *_ = (PRODUCTS if operator == "triangle_multiplication" else MODULES)[name]
    metrics = {"dtype.dw": "bfloat16" if fields.get("weight_dtype") == "bf16" else "float32"}
    ratios = {"out": out, "dz": dz, **{f"dw_{w}": dw if w == worst else 0.5 * dw for w in WEIGHTS[operator]}}
    for tensor, ratio in ratios.items():
        floor, rms = 1e-3, 0.5
        metrics |= {f"rmse.{tensor}": scale * ratio * floor, f"floor.{tensor}": floor, f"ratio.{tensor}": scale * ratio}
        metrics |= {f"rel_rmse.{tensor}": scale * ratio * floor / rms, f"max_err.{tensor}": 0.1, f"ref_rms.{tensor}": rms}
    return record(pair_cell("accuracy", name, operator, **fields), metrics, version=VERSIONS.get(name))


def pair_determinism(name, operator="triangle_multiplication", *, differing=(), **fields):
    results = ("out", "dz", *(f"dw_{w}" for w in WEIGHTS[operator]))
    metrics = {"calls": 5} | {f"bitwise.{t}": t not in differing for t in results}
    return record(pair_cell("determinism", name, operator, **fields), metrics, version=VERSIONS.get(name))


def pair_timing(name, operator="triangle_multiplication", *, n=384, yardstick=0.6, spread=0.02, **fields):
    *_, forward, backward = (PRODUCTS if operator == "triangle_multiplication" else MODULES)[name]
    made = timing("eager", n, spread=spread)
    times = {"forward": forward, "forward_grad": 1.1 * forward, "backward": backward, "both": 1.1 * forward + backward}
    metrics = dict(made.metrics) | {"ms.yardstick": yardstick}
    for key, ms in times.items():
        metrics |= {f"ms.{key}{suffix}": ms * (n / 768) ** 3 for suffix in ("", ".p10", ".p90")}
    return record(pair_cell("kernel_time", name, operator, n, **fields), metrics, version=VERSIONS.get(name))


def pair_run(lengths=(384, 768)):
    """Both operators with most endings: numbers, two dtypes of weights, a peer that is missing, one that does not do a case."""
    records = []
    for n in lengths:
        for direction in ("outgoing", "incoming"):
            for dtype in ("fp32", "bf16"):
                for family in ("normal", "masked"):
                    at = {"n": n, "direction": direction, "weight_dtype": dtype, "family": family}
                    for name in PRODUCTS:
                        if name == "turbopairformer" and dtype == "bf16":
                            reason = "turbopairformer takes weights in fp32"
                            records.append(record(pair_cell("accuracy", name, **at), None, Status.UNSUPPORTED, reason))
                        else:
                            records.append(pair_accuracy(name, **at))
                        records.append(pair_determinism(name, **at, differing=("dw_a_p",) if name == "cuequivariance" else ()))
                    missing = "miniworld-engine is not installed (pip install miniworld-engine)"
                    records.append(record(pair_cell("accuracy", "miniworld_engine", **at), None, Status.NOT_INSTALLED, missing))
                if direction == "outgoing":
                    for name in PRODUCTS:
                        if name != "turbopairformer" or dtype == "fp32":
                            records.append(pair_timing(name, n=n, direction=direction, weight_dtype=dtype))
                    records.append(
                        record(pair_cell("kernel_time", "miniworld_engine", n=n, weight_dtype=dtype), None, Status.NOT_INSTALLED, missing)
                    )
        for name in MODULES:
            for family in ("normal", "masked"):
                records.append(pair_accuracy(name, "attention_module", n=n, family=family))
                records.append(pair_determinism(name, "attention_module", n=n, family=family))
            records.append(pair_timing(name, "attention_module", n=n))
    return records


def step(name, crop=768, busy=9.0, wall=11.0, *, ranks=1, environment=H100):
    of = cell("step_time", name, crop, 32, "openfold", options={"nodes": 1, "ranks_per_node": ranks})
    metrics = {"s.wall": wall, "wall.p10": wall * 0.99, "wall.p90": wall * 1.01, "loss": 3.2145, "grad_norm": 1.0, "peak_bytes": 39 * 2**30}
    metrics |= {"s.backward": wall / 2, "backward.recompute": wall / 5, "ranks": ranks}
    if busy:
        metrics |= {"s.gpu_busy": busy, "gpu.attention": busy / 3, "gpu.gemm": busy / 5, "gpu_communication": 0.5 * (ranks > 1)}
        if ranks > 1:
            metrics |= {"gpu_busy.rank0": busy - 0.5, "gpu_busy.rank1": busy}
    return record(of, metrics, environment=environment)


def run_of_steps(name, losses, distances=(0.01, 0.02), *, environment=H200, crop=256, **more):
    """A stability record with these losses; gradient norms follow them."""
    curves = {
        "loss": losses,
        "grad_norm": [2 * loss for loss in losses],
        "distance": distances,
        "distance_triangle": [2 * d for d in distances],
    }
    metrics = {f"curve.{key}": encode(list(values)) for key, values in curves.items()} | {"steps_done": len(losses), "every": 10}
    metrics |= {
        "loss.first": losses[0],
        "loss.last": losses[-1],
        "grad_norm.median": 2 * losses[len(losses) // 2],
        "grad_norm.max": 2 * max(losses),
    }
    for key in ("distance", "distance_triangle"):
        metrics |= {f"{key}.median": sum(curves[key]) / 2, f"{key}.max": max(curves[key])}
    return record(cell("stability", name, crop, 32, "openfold"), metrics | more, environment=environment)


def whole_run(environment=H200, lengths=(384, 768), dims=(16, 32), seeds=2, families=("normal", "offset", "openfold")):
    """A run with most endings: ok, failed, oom, not installed, unsupported, gated timing, a large spread, differing bits."""
    records = []
    names = [n for n in RATIOS if n != "turbopair.split_p"]
    for n in lengths:
        for d in dims:
            for family in families:
                for seed in range(seeds):
                    at = {"n": n, "d": d, "family": family, "seed": seed, "environment": environment}
                    for name in names:
                        if name == "trifast" and n == 768 and seed == 1:
                            reason = "CUDA error: an illegal memory access was encountered <at 0x7f|&_%>"
                            records.append(record(cell("accuracy", name, n, d, family, seed), None, Status.FAILED, reason, environment))
                        else:
                            records.append(accuracy(name, **at))
                        differing = {"flex": ("dbias",), "cuequivariance": ("dq", "dbias"), "openfold3_triton": ("dq",)}.get(name, ())
                        records.append(determinism(name, **at, differing=differing))
                    for name in ("turbopair.plain", "turbopair.paper", "turbopair.split_p", "turbopair.exact"):
                        made = accuracy(name, **at, experiment="ablation")
                        ms = {"turbopair.plain": 3.6, "turbopair.paper": 3.7, "turbopair.split_p": 3.8, "turbopair.exact": 4.2}[name]
                        records.append(made.model_copy(update={"metrics": {**made.metrics, "ms.both": ms * (n / 768) ** 3}}))
                    for name, status, reason in (
                        ("deepspeed", Status.NOT_INSTALLED, "deepspeed is not installed: pip install deepspeed==0.19.8"),
                        ("megafold", Status.UNSUPPORTED, "MegaFold needs N divisible by 128"),
                    ):
                        for experiment in ("accuracy", "determinism"):
                            records.append(record(cell(experiment, name, n, d, family, seed), None, status, reason, environment))
            for name in TIMES:
                if name == "eager" and n == 768 and d == 32:
                    records.append(
                        record(cell("kernel_time", name, n, d), None, Status.OOM, "out of GPU memory: tried 14 GiB", environment)
                    )
                else:
                    records.append(timing(name, n, d, environment=environment, spread=0.08 if name == "sdpa" else 0.02))
            records.append(
                record(cell("kernel_time", "deepspeed", n, d), None, Status.NOT_INSTALLED, "deepspeed is not installed", environment)
            )
    records.append(record(cell("kernel_time", "turbopair.split_p", 384, 32), timing("turbopair.paper").metrics, environment=environment))
    for crop, scale in ((384, 0.3), (768, 1.0)):
        for name, busy in {"pytorch": 14.0, "triton": 11.2, "cuequivariance": 9.24, "turbopair": 6.4}.items():
            records.append(step(name, crop, busy * scale, busy * scale + 3, environment=environment))
        lma = cell("step_time", "lma", crop, 32, "openfold")
        records.append(record(lma, None, Status.TIMEOUT, "longer than 3600 s", environment))
    for name, apart, distance in (("pytorch_fp32", 0, 0.0), ("pytorch", 2e-3, 0.02), ("turbopair.paper", 1e-3, 0.01)):
        losses = [5 / (1 + k / 10) * (1 + apart * (-1) ** k) for k in range(20)]
        records.append(run_of_steps(name, losses, (distance, 2 * distance), environment=environment))
    reason = "cuequivariance_torch is not installed"
    records.append(record(cell("stability", "cuequivariance", 256, 32, "openfold"), None, Status.NOT_INSTALLED, reason, environment))
    return records
