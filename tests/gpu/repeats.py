"""What the tests of repeatability share: other work on the card, other contents of memory, other addresses, and a short training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.gpu import checks

REPEATS = 20
BF16 = torch.bfloat16


@contextmanager
def busy_stream(device: torch.device) -> Iterator[None]:
    """Keep a second stream full of matrix products, which take SMs away at changing times."""
    stream = torch.cuda.Stream(device)
    a = torch.randn(8192, 8192, device=device, dtype=BF16)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(100):
            a = (a @ a).clamp_(-1, 1)
    try:
        yield
    finally:
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()


def poison(device: torch.device, byte: int, largest: int = 1 << 28) -> None:
    """Fill the caching allocator's free blocks with a byte: 0xff is NaN to floats and -1 to integer counters."""
    size, blocks = 512, []
    while size <= largest:
        blocks += [torch.empty(size, dtype=torch.uint8, device=device).fill_(byte) for _ in range(3)]
        size *= 2
    del blocks


def disturbed(device: torch.device) -> Iterator[int]:
    """Count to REPEATS beside a busy stream, with other addresses and other contents of memory each time."""
    kept = []
    with busy_stream(device):
        for repeat in range(REPEATS):
            poison(device, (0xFF, 0x00, 0x7F, 0x01)[repeat % 4], 1 << 24)
            kept.append(torch.empty((repeat + 1) * 700_001, dtype=torch.uint8, device=device))
            if repeat % 5 == 4:
                kept.clear()
                torch.cuda.empty_cache()
            yield repeat


def assert_trainings_agree(make: Callable[[], torch.nn.Module], shape: tuple[int, ...], device: torch.device) -> None:
    """Five optimizer steps, twice, the second time beside a busy stream: losses and weights of the same bits. The losses change."""
    first = _train(make(), shape, device)
    poison(device, 0xFF)
    with busy_stream(device):
        second = _train(make(), shape, device)
    assert all(checks.same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert not checks.same_bits(first[0], first[4])


def _train(model: torch.nn.Module, shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """The losses of five steps and the weights after them."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(5):
        pair, target = (torch.randn(shape, generator=generator).to(device, BF16) for _ in range(2))
        loss = (model(pair) - target).float().square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]
