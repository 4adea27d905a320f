"""Unmodified Hugging Face models: regions are added from outside."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from tests.capture.reference import Batch, check, pipeline
from torch import nn

from piper.capture import annotate_module
from piper.ir.dag import Role

transformers = pytest.importorskip("transformers")


def batch(rows: int) -> Batch:
    return {"input_ids": torch.randint(0, 64, (rows, 6))}, torch.randint(0, 64, (rows, 6))


def loss(outputs: object, targets: torch.Tensor) -> torch.Tensor:
    logits = outputs.logits  # type: ignore[attr-defined]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def staged(layers: nn.ModuleList, stages: int) -> None:
    per_stage = len(layers) // stages
    for index, layer in enumerate(layers):
        annotate_module(layer, "PP", index // per_stage)


def llama(layers: int = 2, **changes: object) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        use_cache=False,
        **changes,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double()


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    staged(model.model.layers, 2)
    dag = check(model, loss, batch, chunks=pipeline(2))
    assert len(dag.contributions["model.embed_tokens.weight"]) == (2 if tied else 1)
    bodies = {n.label: n.work.body for n in dag.chunks()}
    assert len(set(bodies.values())) == 4


def test_llama_sends_only_activations_between_stages() -> None:
    model = llama(4)
    staged(model.model.layers, 4)
    dag = check(model, loss, batch, chunks=pipeline(4))
    for node in range(1, 4):
        inputs = [dag.values[v] for v in dag.nodes[node].inputs]
        assert sum(v.role is Role.ACTIVATION for v in inputs) == 1
    bodies = {n.label: n.work.body for n in dag.chunks()}
    assert bodies["F PP=1"] == bodies["F PP=2"]
    assert bodies["B PP=1"] == bodies["B PP=2"]


def test_gpt2() -> None:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double()
    staged(model.transformer.h, 2)
    dag = check(model, loss, batch, chunks=pipeline(2))
    assert len(dag.contributions["transformer.wte.weight"]) == 2
