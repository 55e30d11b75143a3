import warnings

import pytest
import torch

from pipeline.openfold.deterministic import _operator, deterministic_algorithms


def test_the_switch_is_on_inside_and_as_before_outside():
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="it broke"), deterministic_algorithms():
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        raise RuntimeError("it broke")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_operators_without_a_deterministic_form_are_named():
    with deterministic_algorithms() as left:
        warnings.warn(
            "adaptive_max_pool2d_backward_cuda does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True, warn_only=True)'.",
            UserWarning,
            stacklevel=1,
        )
        warnings.warn("something else", UserWarning, stacklevel=1)
        torch.ones(3).cumsum(0)
    assert left == {"adaptive_max_pool2d_backward_cuda"}


def test_what_the_messages_are_about():
    cublas = "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or ... CuBLAS"
    assert _operator(cublas) == "cuBLAS without CUBLAS_WORKSPACE_CONFIG"
    assert _operator("put_ does not have a deterministic implementation, but you set") == "put_"
    assert _operator("the operator put_ is slow") is None
