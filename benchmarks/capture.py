"""Capture time of models of 24 layers, split into the trace (torch) and the partition into chunks
(Piper).

The transformer of ``piper.models`` with four pipeline regions, the same with a region per layer,
and a Hugging Face Llama, if transformers is installed. Processor seconds; the best of a few tries,
the first of which pays for torch's own warm-up.
"""

import argparse
import importlib.util
import time

import torch
from benchmarks.support import machine

from piper.capture.annotate import annotate_module
from piper.capture.batch import Batch, flatten_batch
from piper.capture.joint import LossFn, capture_joint
from piper.capture.partition import partition
from piper.models.transformer import Transformer, TransformerConfig, transformer_loss
from piper.pausing import collector_paused

LAYERS = 24


def measure(
    name: str, model: torch.nn.Module, loss_fn: LossFn, example: tuple[object, object], tries: int
) -> None:
    """Print one line."""
    best: tuple[float, float] | None = None
    first = 0.0
    for attempt in range(tries):
        batch: Batch = flatten_batch(model.forward, example, None)
        with collector_paused():  # as in piper.capture
            began = time.process_time()
            joint = capture_joint(model, loss_fn, batch, batch_size=None, grad=True)
            traced = time.process_time()
            nodes = len(joint.module.graph.nodes)
            dag = partition(joint, batch).dag
            done = time.process_time()
        taken = traced - began, done - traced
        if attempt == 0:
            first = sum(taken)
        best = taken if best is None or sum(taken) < sum(best) else best
    assert best is not None
    trace, cut = best
    print(
        f"capture {name}: {nodes} graph nodes, {len(dag.nodes)} chunks, {len(dag.bodies)} bodies: trace {trace:.2f} s, "
        f"partition {cut:.2f} s, together {trace + cut:.2f} s (first time {first:.2f} s)",
        flush=True,
    )


def transformer(num_stages: int) -> Transformer:
    """Small in width, deep as asked."""
    return Transformer(
        TransformerConfig(width=128, num_layers=LAYERS, num_heads=2, num_stages=num_stages)
    )


def llama() -> torch.nn.Module:
    """Hugging Face's, unmodified; every layer a region from outside."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 (optional)

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    per_stage = LAYERS // 4
    for index, layer in enumerate(model.model.layers):
        annotate_module(layer, "PP", index // per_stage)
    return model


def llama_loss(outputs: object, targets: object) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    logits = outputs.logits  # type: ignore[attr-defined]  # transformers' output class
    assert isinstance(targets, torch.Tensor)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tries", type=int, default=3)
    tries = parser.parse_args().tries
    print(machine())
    ids = torch.randint(0, 256, (4, 64))
    for stages in (4, LAYERS):
        name = f"transformer, {LAYERS} layers, {stages} regions"
        measure(name, transformer(stages), transformer_loss, (ids, ids), tries)
    if importlib.util.find_spec("transformers") is None:
        print("capture Llama: skipped: transformers is not installed")
        return
    measure(f"Llama, {LAYERS} layers, 4 regions", llama(), llama_loss, (ids, ids), tries)


if __name__ == "__main__":
    main()
