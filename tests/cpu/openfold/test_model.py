import pytest
import torch
from scipy.stats import truncnorm

from pipeline.config import MOST_RECYCLES
from pipeline.openfold import model


@pytest.mark.parametrize("name", list(model.BACKENDS))
def test_a_backend_turns_on_its_setting_and_no_other(openfold3, name):
    backend = model.find_backend(name)
    memory = model.configure(backend, "reduced").settings.memory.train
    on = {other.setting for other in model.BACKENDS.values() if other.setting is not None and memory[other.setting]}
    assert on == ({backend.setting} if backend.setting else set())


def test_full_depth_is_the_published_training_setup(openfold3):
    stock = model.find_backend("pytorch")
    config = model.configure(stock, "full", tokens=384)
    architecture = config.architecture
    assert (architecture.pairformer.no_blocks, architecture.msa.msa_module.no_blocks) == (48, 4)
    assert (architecture.shared.diffusion.no_samples, architecture.shared.diffusion.no_mini_rollout_steps) == (48, 20)
    assert config.settings.blocks_per_ckpt == 1 and config.settings.gradient_clipping.per_sample_clipping
    assert model.configure(stock, "full", tokens=768).architecture.shared.diffusion.no_samples == 32
    assert model.loss_weights(384)["smooth_lddt"] == 4.0 and model.loss_weights(768)["bond"] == 4.0
    with pytest.raises(ValueError, match="unknown depth 'half'; known are full, reduced"):
        model.configure(stock, "half")


def test_filling_leaves_no_matrix_zero_and_is_seeded(modules):
    filled, zero = modules("pytorch", 0.1).model, modules("pytorch", 0.0).model
    gate = "pairformer_stack.blocks.0.pair_stack.tri_att_start.mha.linear_o.weight"
    assert not dict(zero.named_parameters())[gate].any()
    weight = dict(filled.named_parameters())[gate]
    assert weight.std().item() == pytest.approx(0.1 / weight.shape[1] ** 0.5, rel=0.1)
    assert all(p.any() for p in filled.parameters() if p.dim() == 2)
    assert model.fill_zero_initialised(filled, 0.1) == 0
    assert model.fill_zero_initialised(zero, 0.1, seed=0) > 100
    assert torch.equal(dict(zero.named_parameters())[gate], weight)


def test_quick_weights_have_the_same_distribution_and_every_backend_gets_the_same(openfold3):
    cpu = torch.device("cpu")
    quick, other = (model.fresh(model.find_backend(name), "reduced", 384, 0, cpu).model for name in ("turbopair", "lma"))
    assert other.settings.memory.train.use_lma and not quick.settings.memory.train.use_lma
    weights = dict(quick.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in other.named_parameters())
    assert all(p is not weights[name] and p.data_ptr() != weights[name].data_ptr() for name, p in other.named_parameters())
    linear = weights["pairformer_stack.blocks.0.pair_stack.tri_att_start.mha.linear_q.weight"]
    assert linear.std().item() == pytest.approx(1 / linear.shape[1] ** 0.5, rel=0.05)  # LeCun's, cut off at two standard deviations
    assert linear.abs().max().item() == pytest.approx(2 / 0.8796 / linear.shape[1] ** 0.5, rel=0.01)
    assert model._TruncatedNormal.std() == pytest.approx(truncnorm.std(a=-2, b=2))


def test_weights_are_copied_to_the_device_and_stay_as_drawn(openfold3):
    module = model.fresh(model.find_backend("pytorch"), "reduced", 384, 0, torch.device("meta"))
    drawn = model._drawn("reduced", 384, 0)
    assert {t.device.type for t in module.state_dict().values()} == {"meta"}
    assert {t.device.type for t in drawn.state_dict().values()} == {"cpu"}
    original = dict(drawn.named_parameters())
    for name, parameter in module.named_parameters():
        assert parameter.shape == original[name].shape and parameter.requires_grad == original[name].requires_grad
        assert parameter.stride() == original[name].stride() and type(parameter) is type(original[name])


def test_attention_only_turns_the_setting_off_for_every_multiplication(modules):
    network = modules("pytorch", 0.1).model
    sites = model.keep_stock_multiplication(network)
    # outgoing and incoming, in a block of the template, MSA and confidence stacks and in two of the pairformer
    assert sites == 10
    site = network.pairformer_stack.blocks[0].pair_stack.tri_mul_out
    seen = []
    site.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    z = torch.randn(1, 4, 4, site.c_z, generator=torch.Generator().manual_seed(0))
    site(z, use_cueq_triangle_kernels=True)
    assert seen == [{"use_cueq_triangle_kernels": False}]


def test_recycles_are_fixed_within_the_range_of_training(modules):
    network = modules("pytorch", 0.1).model
    model.fix_recycles(network, 2)
    assert [network.synced_generator.integers(low=0, high=4) for _ in range(3)] == [2, 2, 2]
    assert network.shared.num_recycles == MOST_RECYCLES, "the configuration accepts what the model does"
    with pytest.raises(ValueError, match="trains with 0 to 3 recycles; asked for 4"):
        model.fix_recycles(network, 4)


def test_names_are_refused_with_what_there_is():
    with pytest.raises(ValueError, match="no backend 'torch'; it has pytorch, lma"):
        model.find_backend("torch")


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(model.importlib.metadata, "version", lambda name: "0.4.1")
    with pytest.raises(model.OpenFold3Missing, match=r"openfold3 0\.4\.1 is installed; .* written for 0\.5\.0"):
        model.require()
