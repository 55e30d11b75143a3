"""A few small calls of every kernel, for compute-sanitizer: see sanitize.sh. Sizes with tails, every path, precision and mask kind."""

import argparse

import torch

import turbopair


def call(n: int, keys: int, slices: int, heads: int, dim: int, dtype: torch.dtype, mask: str, precision: str) -> None:
    """Run forward and backward once on random inputs and check that everything is finite."""
    generator = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_()

    q, k, v = normal(1, slices, n, heads, dim), normal(1, slices, keys, heads, dim), normal(1, slices, keys, heads, dim)
    bias = normal(1, 1, heads, n, keys)
    keep = (torch.rand(1, slices, 1, 1, keys, generator=generator) > 0.3).cuda()
    keep[:, 0] = False
    masks = {"none": None, "bool": keep, "additive": torch.where(keep, 0.0, -1e9)}
    out = turbopair.triangle_attention(q, k, v, bias, masks[mask], precision=precision)
    results = (out, *torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out)))
    # On the CPU: every kernel of PyTorch on the GPU would be instrumented as well.
    if not all(result.detach().cpu().isfinite().all() for result in results):
        raise SystemExit(f"not finite: n={n} keys={keys} dim={dim} {dtype} mask={mask} {precision}")


def main() -> None:
    """Run the cases; ``--quick`` keeps the smallest, for racecheck, which is slow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    bf16, fp32 = torch.bfloat16, torch.float32
    sizes = [(70, 70, 3)] if quick else [(1, 1, 1), (3, 2, 2), (64, 64, 2), (70, 70, 3), (65, 130, 3), (200, 200, 2)]
    others = [(24, bf16, "additive"), (48, bf16, "bool"), (16, fp32, "none"), (32, fp32, "bool"), (64, fp32, "additive")]
    for n, keys, slices in sizes:
        for dim in (16, 32):
            for precision in turbopair.PRECISIONS:
                call(n, keys, slices, 2, dim, bf16, "bool" if precision == "exact" else "none", precision)
        for dim, dtype, mask in others:
            call(n, keys, slices, 2, dim, dtype, mask, turbopair.DEFAULT_PRECISION)
    if not quick:
        call(1000, 1000, 1, 1, 32, bf16, "bool", "exact")  # K and V streamed
    torch.cuda.synchronize()
    print("all cases ran")


if __name__ == "__main__":
    main()
