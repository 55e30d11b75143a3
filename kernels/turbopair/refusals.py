"""Words that the operators' refusals share: shapes, alternatives, and whether a shape broadcasts."""

import difflib
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd import forward_ad


def show(tensor: Tensor) -> str:
    """The shape of a tensor, as "[1, 5, 5]"."""
    return symbols(*tensor.shape)


def symbols(*sizes: int | str) -> str:
    """Sizes, numbers or letters, as a shape."""
    return "[" + ", ".join(str(size) for size in sizes) + "]"


def not_among(given: object, names: Iterable[str]) -> str:
    """What was given, a near name if there is one, and the names: "'exakt' (did you mean 'exact'?); accepted: 'paper', 'exact'"."""
    known = list(names)
    close = difflib.get_close_matches(str(given), known, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{given!r}{hint}; accepted: {', '.join(map(repr, known))}"


def broadcasts(given: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a shape has as many dimensions as another, each of its size or 1."""
    return len(given) == len(wanted) and all(a in (1, b) for a, b in zip(given, wanted, strict=True))


def refuse_forward_mode(operator: str, tensors: Iterable[Tensor]) -> None:
    """Raise NotImplementedError if a tensor carries a forward-mode derivative, which the operator would drop without a word."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(
            f"turbopair.{operator} was given a forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); accepted: reverse mode "
            "(backward, torch.autograd.grad), or PyTorch's own operations in this layer"
        )
