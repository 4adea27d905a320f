import contextlib

import pytest
import torch

from piper.errors import ConfigError
from piper.models import (
    MLP,
    MLPConfig,
    Multi,
    MultiConfig,
    Transformer,
    TransformerConfig,
    UNet,
    UNetConfig,
    generate,
    mlp_loss,
    multi_loss,
    transformer_loss,
    unet_loss,
)
from piper.models.stages import stage_layers


@pytest.fixture
def regions(monkeypatch):
    """The regions entered by the models, in order; each must be left before the next is entered."""
    entered = []
    depth = [0]

    @contextlib.contextmanager
    def record(name, index=None):
        assert depth[0] == 0
        depth[0] += 1
        entered.append((name, index))
        yield
        depth[0] -= 1

    for module in ("mlp", "multi", "transformer", "unet"):
        monkeypatch.setattr(f"piper.models.{module}.annotate", record)
    return entered


def tiny(**sizes):
    torch.manual_seed(0)
    config = TransformerConfig(width=16, num_heads=2, context=8, **sizes)
    return Transformer(config).double()


def tokens(*shape):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 7])
def test_every_stage_of_every_model_is_a_region(regions, num_stages):
    expected = [("PP", stage) for stage in range(num_stages)]
    ids = tokens(2, 8)
    runs = [
        lambda: tiny(num_layers=7, num_stages=num_stages)(ids),
        lambda: MLP(MLPConfig(num_layers=7, num_stages=num_stages))(torch.ones(2, 8)),
        lambda: UNet(UNetConfig(num_stages=num_stages))(torch.ones(2, 3, 8, 8)),
        lambda: Multi(MultiConfig(num_stages=num_stages))(ids % 16, ids > 0),
    ]
    for run in runs:
        regions.clear()
        run()
        assert regions == expected


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(7, 3, [3, 2, 2]), (8, 4, [2, 2, 2, 2]), (5, 4, [2, 1, 1, 1]), (3, 1, [3])],
)
def test_layers_are_dealt_in_order_and_evenly(num_layers, num_stages, sizes):
    stages = stage_layers(num_layers, num_stages)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


def test_stages_do_not_change_the_transformer():
    ids = tokens(2, 8)
    whole = tiny(num_layers=5)
    staged = tiny(num_layers=5, num_stages=3)
    staged.load_state_dict(whole.state_dict())
    assert torch.equal(whole(ids), staged(ids))


def test_transformer_sees_only_the_past():
    model = tiny(num_layers=2)
    ids = tokens(1, 8)
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 5], after[:, 5])


def test_transformer_attends_to_the_past():
    model = tiny(num_layers=1)
    ids = tokens(1, 8)
    changed = ids.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 256
    assert not torch.allclose(model(ids)[:, 7], model(changed)[:, 7], rtol=0, atol=1e-12)


def test_tied_embedding_is_one_parameter_trained_from_both_ends():
    tied = tiny(num_layers=2, tied_embedding=True)
    assert tied.head.weight is tied.token_embedding.weight
    untied = tiny(num_layers=2)
    untied.load_state_dict(tied.state_dict())
    ids = tokens(2, 9)
    for model in (tied, untied):
        transformer_loss(model(ids[:, :-1]), ids[:, 1:]).backward()
    both = untied.head.weight.grad + untied.token_embedding.weight.grad
    torch.testing.assert_close(tied.head.weight.grad, both, rtol=0, atol=1e-14)


def test_transformer_loss_at_initialisation_is_that_of_a_uniform_guess():
    ids = tokens(4, 9)
    loss = transformer_loss(tiny(num_layers=2)(ids[:, :-1]), ids[:, 1:])
    assert loss.item() == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.1)


def test_dropout_acts_in_training_only():
    model = tiny(num_layers=2, dropout=0.5)
    ids = tokens(1, 8)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_sequence_beyond_the_context_is_refused():
    with pytest.raises(ConfigError, match=r"at most 8 tokens, found 9; increase .*context to 9"):
        tiny(num_layers=1)(tokens(1, 9))


def test_generate_follows_the_models_own_prediction():
    model = tiny(num_layers=2).train()
    with torch.no_grad():
        model.head.weight.zero_()
        model.norm.bias.fill_(1.0)
        model.norm.weight.zero_()
        model.head.weight[65] = 10.0
    assert generate(model, b"x", 12, temperature=0.0) == b"A" * 12
    assert generate(model, b"x", 12, temperature=1.0) == b"A" * 12
    assert model.training


def test_generate_repeats_under_one_seed():
    model = tiny(num_layers=1)

    def sample(seed):
        return generate(model, b"def ", 24, 1.0, torch.Generator().manual_seed(seed))

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)
    assert len(sample(0)) == 24


@pytest.mark.parametrize(
    ("prompt", "temperature", "vocab_size", "message"),
    [
        (b"", 1.0, 256, "at least one byte"),
        (b"a", -1.0, 256, "temperature >= 0, found -1"),
        (b"a", 1.0, 100, "byte vocabulary of 256, found 100"),
    ],
)
def test_generate_refuses_what_it_cannot_do(prompt, temperature, vocab_size, message):
    model = tiny(num_layers=1, vocab_size=vocab_size)
    with pytest.raises(ConfigError, match=message):
        generate(model, prompt, 1, temperature)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5])
def test_unet_keeps_the_images_shape_and_uses_every_skip(num_stages):
    torch.manual_seed(0)
    config = UNetConfig(num_stages=num_stages)
    model = UNet(config).double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    outputs = model(images)
    assert outputs.shape == images.shape
    skips = {stage: config.skip_source(stage) for stage in range(num_stages)}
    for target, source in skips.items():
        if source is None:
            continue
        with torch.no_grad():
            model.convs[target].weight[:, config.width :] += 1.0
        changed = model(images)
        assert not torch.allclose(outputs, changed), f"skip {source} -> {target}"
        outputs = changed


def test_unet_of_four_stages_skips_from_0_to_3_and_1_to_2():
    config = UNetConfig(num_stages=4)
    assert [config.skip_source(stage) for stage in range(4)] == [None, None, 1, 0]


def test_multi_hands_integers_booleans_and_floats_to_later_stages():
    torch.manual_seed(0)
    model = Multi(MultiConfig()).double()
    ids = tokens(3, 5) % 16
    _, signals = model.entry(ids)
    assert signals.routes.dtype is torch.int64
    assert signals.active.dtype is torch.bool
    assert signals.table.dtype is torch.float64
    assert not signals.table.requires_grad
    assert signals.auxiliary.requires_grad
    assert signals.active.any()
    assert not signals.active.all()
    assert len(signals.routes.unique()) > 1


def test_multi_reads_mask_and_gain_in_every_stage():
    torch.manual_seed(0)
    model = Multi(MultiConfig()).double()
    ids = tokens(3, 5) % 16
    mask = torch.ones(3, 5, dtype=torch.bool)
    logits, score = model(ids, mask)
    assert logits.shape == (3, 5, 16)
    assert score.shape == (3,)
    assert not torch.allclose(logits, model(ids, mask, gain=2.0)[0])
    assert not torch.allclose(logits, model(ids, ~mask)[0])


def test_every_parameter_of_every_model_gets_a_gradient():
    torch.manual_seed(0)
    ids = tokens(4, 9)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    samples = torch.randn(4, 8, dtype=torch.float64)
    small = ids[:, :-1] % 16
    transformer, mlp = tiny(num_layers=2), MLP(MLPConfig(num_stages=2)).double()
    unet, multi = UNet(UNetConfig()).double(), Multi(MultiConfig()).double()
    losses = {
        transformer: lambda: transformer_loss(transformer(ids[:, :-1]), ids[:, 1:]),
        mlp: lambda: mlp_loss(mlp(samples), samples[:, :4]),
        unet: lambda: unet_loss(unet(images), images.roll(1, 0)),
        multi: lambda: multi_loss(multi(small, small > 3), (small, samples[:, 0])),
    }
    for model, loss in losses.items():
        loss().backward()
        assert all(parameter.grad is not None for parameter in model.parameters()), model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TransformerConfig(width=10, num_heads=4), "multiple of num_heads=4, found 10"),
        (lambda: TransformerConfig(num_layers=0), r"num_layers: expected an integer >= 1, found 0"),
        (lambda: TransformerConfig(dropout=1.0), "dropout: expected 0 <= dropout < 1, found 1.0"),
        (lambda: MLPConfig(width=-1), "MLPConfig.width: expected an integer >= 1, found -1"),
        (lambda: MultiConfig(num_routes=0), "MultiConfig.num_routes"),
        (lambda: UNetConfig(image_size=6, num_stages=5), "multiple of 4 for 5 stages, found 6"),
        (lambda: tiny(num_layers=2, num_stages=3), "3 stages cannot share 2 layers"),
    ],
)
def test_contradicting_sizes_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
