"""Small OpenFold3 steps, shared by the tests of this folder; skipped, with the reason, where OpenFold3 is not installed."""

import copy

import pytest
import torch

from pipeline.openfold import batches, model
from pipeline.openfold.ranks import Ranks
from pipeline.openfold.step import TrainingStep

TOKENS = 32


@pytest.fixture(scope="session")
def openfold3():
    try:
        model.require()
    except model.OpenFold3Missing as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def modules(openfold3):
    """A function giving a fresh copy of the reduced module, with a backend and zero-initialised weights filled or not.

    The module is built once: drawing its weights takes longer than a step.
    """
    built = model.build(model.configure(model.find_backend("pytorch"), "reduced"), seed=0, fill=0)

    def get(backend, fill):
        module = copy.deepcopy(built)
        memory = module.model.settings.memory.train
        for setting in (b.setting for b in model.BACKENDS.values() if b.setting is not None):
            memory[setting] = setting == model.find_backend(backend).setting
        if fill:
            model.fill_zero_initialised(module.model, fill, seed=0)
        return module

    return get


@pytest.fixture
def make_step(modules):
    """A function which builds a training step of the reduced model on a crop; the same arguments give the same step."""

    def make(backend="pytorch", bf16=True, fill=0.1):
        module = modules(backend, fill)
        model.fix_recycles(module.model, 0)
        batch = batches.crop(batches.read("1y57_384"), TOKENS, msa_rows=8)
        model.seed_rank(0, 0)
        return TrainingStep(module, batch, Ranks(0, 1, torch.device("cpu")), bf16=bf16)

    return make


@pytest.fixture
def layer(openfold3):
    """A function building a TriangleAttention with no weight zero."""
    from openfold3.core.model.layers.triangular_attention import TriangleAttention

    def build(c=32, head_dim=16, heads=4, **options):
        torch.manual_seed(0)
        attention = TriangleAttention(c, head_dim, heads, **options)
        model.fill_zero_initialised(attention, 1.0)
        return attention

    return build
