"""Unmodified Qwen3-MoE and Mixtral: their experts as regions, under pipeline × experts × data
parallelism.
"""

import pytest
import torch
from tests.cases.equal import assert_equal, randint
from tests.models.families import FAMILIES, staged
from torch import nn
from torch.nn import functional

import piper
from piper.errors import ConfigError
from piper.models.huggingface import annotate_experts

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
    "output_router_logits": True,
}


def qwen3() -> nn.Module:
    sizes = {"num_experts": 4, "moe_intermediate_size": 6, "intermediate_size": 8, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **sizes))


def mixtral() -> nn.Module:
    sizes = {"num_local_experts": 4, "intermediate_size": 6}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **sizes))


def loss(outputs: object, targets: torch.Tensor) -> torch.Tensor:
    logits = outputs.logits  # type: ignore[attr-defined]
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("make", "replicas"),
    [(qwen3, 1), pytest.param(mixtral, 2, marks=pytest.mark.full), (mixtral, 1)],
)
def test_trains_under_pipeline_experts_and_data_parallelism(make, replicas):
    torch.manual_seed(0)
    model = make().double()
    model.set_experts_implementation("eager")
    ids = randint(16, 16, 4)
    before = model(input_ids=ids).logits
    assert annotate_experts(model) == 2
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-12, atol=1e-12)
    for index, layer in enumerate(model.model.layers):
        piper.annotate_module(layer, "PP", index)
    pairs = [[d, d + 1] for d in range(0, 4 * replicas, 2)]
    devices = list(range(4 * replicas))
    stages = [devices[: 2 * replicas], devices[2 * replicas :]]
    strategy = [
        *piper.placements.chain(stages),
        piper.Replicate({}, shard_optimizer=True),
        piper.Shard({"EP": "*"}, devices=pairs),
        piper.Split({}, num_microbatches=2),
        *piper.schedules.one_f_one_b(2, 2),
    ]
    plan = assert_equal(model, loss, strategy, ({"input_ids": ids}, ids.roll(1, 1)), steps=1)
    assert plan.dag.expert_groups["model.layers.1.mlp.experts.down_proj"] == tuple(
        map(tuple, pairs[replicas:])
    )


def test_a_model_without_experts():
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        annotate_experts(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("with_mask", [True, False])
def test_a_llama_in_bfloat16_equals_one_process(with_mask):
    """Its attention calls the kernel in another way when it is captured than when it is run."""
    sizes = {**SIZES, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    del sizes["num_experts_per_tok"], sizes["output_router_logits"]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, intermediate_size=64, tie_word_embeddings=True)
    )
    for index, layer in enumerate(model.model.layers):
        piper.annotate_module(layer, "PP", index)
    ids = randint(16, 8, 12)
    inputs = {"input_ids": ids}
    if with_mask:
        inputs["attention_mask"] = torch.ones_like(ids)
    report = piper.check(
        model,
        loss,
        piper.strategies.pipeline("1f1b", [[0], [1]], 2),
        (inputs, ids),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        steps=1,
        precision="bf16",
    )
    assert report.ok, str(report)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    "implementation", ["eager", pytest.param("grouped_mm", marks=pytest.mark.full)]
)
def test_experts_that_nobody_annotated_are_captured_by_themselves(implementation):
    """Whichever implementation the model has: transformers' loop has shapes that depend on the data,
    its grouped products no float64. The reference is that loop.
    """
    family = FAMILIES["mixtral"]
    model = staged(family, 1, num_hidden_layers=1)
    model.set_experts_implementation(implementation)
    strategy = [piper.Place({}, [0, 1]), piper.Replicate({}), piper.Split({}, num_microbatches=2)]
    inputs, targets = family.batch()
    report = piper.check(model, family.loss, strategy, (inputs, targets), optimizer=sgd, steps=1)
    assert report.ok, str(report)
    with piper.compile(
        model, family.loss, strategy, (inputs, targets), optimizer=sgd, backend="inprocess"
    ) as trainer:
        expected = family.loss(model(**inputs), targets)
        assert trainer.step(inputs, targets).loss == pytest.approx(float(expected.detach()), 1e-5)
    assert model.config._experts_implementation == implementation


def test_what_looks_like_experts_and_cannot_be_annotated_is_named():
    sizes = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}
    model = transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**sizes, num_experts=2, num_sparse_encoder_layers=1)
    )
    with pytest.raises(ConfigError, match=r"encoder\.block\.1\.layer\.1\.mlp\.experts \(Switch"):
        annotate_experts(model)
    mixed = nn.ModuleList([mixtral(), model])
    with pytest.warns(piper.errors.PiperWarning, match=r"marks 2 modules.*leaves out.*1\.encoder"):
        assert annotate_experts(mixed) == 2
