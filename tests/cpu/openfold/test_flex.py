"""FlexAttention in OpenFold3's sites. Its gradients need a GPU: here the core is replaced by its formula, or runs without gradients."""

import pytest
import torch

from pipeline.openfold import flex, model
from tests.cpu.openfold.test_install import inputs, update


def formula(q, k, v, bias, keep, scale):
    """[I, H, N, D] with bias [H, N, N] and keep [I, N], as `flex._flex`."""
    logits = q @ k.mT * scale + bias
    if keep is not None:
        logits = torch.where(keep[:, None, None], logits, -1e9)
    return logits.softmax(-1) @ v


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(flex, "_core", lambda: formula)


@pytest.mark.parametrize("options", [{}, {"transpose_bias": True}, {"starting": False}], ids=["start", "end", "ending node"])
@pytest.mark.parametrize("shape", [(1, 9, 9, 32), (1, 2, 9, 9, 32)], ids=["pair", "templates"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_layer_agrees_with_stock(plain, layer, shape, options, masked):
    options = dict(options)
    attention = layer(starting=options.pop("starting", True))
    original = type(attention)
    x, mask = inputs(*shape)
    options |= {"mask": mask, "rows": 1} if masked else {"mask": None}
    expected = update(attention, x, **options)
    flexed = flex.plug(attention)
    actual = update(attention, x, **options)
    assert [row[1:] for row in flexed.report()] == [("triangle_attention", "flex", None, 1, 0)]
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5 * value.abs().max().item())
    flexed.remove()
    assert type(attention) is original and not hasattr(attention, "_flex_calls")


def test_the_core_is_flex_attention():
    """PyTorch's uncompiled form on a CPU, without gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 16, 8, generator=generator) for _ in range(3))
    bias, keep = torch.randn(2, 16, 16, generator=generator), torch.rand(3, 16, generator=generator) > 0.3
    with torch.no_grad():
        for mask in (keep, None):
            torch.testing.assert_close(flex._flex(q, k, v, bias, mask, 0.3), formula(q, k, v, bias, mask, 0.3))


def test_every_attention_of_the_model_gets_it_and_no_multiplication(modules):
    network = modules("pytorch", 0.1).model
    flexed = flex.plug(network)
    assert [row.site.rsplit(".", 1)[1] for row in flexed.report()] == ["tri_att_start", "tri_att_end"] * 5
    assert model.not_served(flexed) == [row.site for row in flexed.report()]  # none has been called
