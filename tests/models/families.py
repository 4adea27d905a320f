"""Small unmodified Hugging Face models, one per family, with a batch and a loss for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tests.cases.equal import randint, randn
from torch import nn
from torch.nn import functional

import piper

VOCABULARY, LENGTH, ROWS = 32, 6, 8
LAYERS = 4

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """``make()`` builds a model, ``layers(model)`` are what is divided into stages, ``batch()`` is
    an example.
    """

    make: Callable[..., nn.Module]
    layers: Callable[[nn.Module], Sequence[nn.Module]]
    batch: Callable[[], Batch]
    loss: Callable[[object, torch.Tensor], torch.Tensor]


def staged(family: Family, num_stages: int, **changes: object) -> nn.Module:
    """A model of the family with its layers divided into equally many per stage."""
    torch.manual_seed(0)
    model = family.make(**changes).train()
    layers = family.layers(model)
    for index, layer in enumerate(layers):
        piper.annotate_module(layer, "PP", index * num_stages // len(layers))
    return model


def tokens() -> Batch:
    ids = randint(VOCABULARY, ROWS, LENGTH)
    return {"input_ids": ids}, ids.roll(1, 1)


def translation() -> Batch:
    source, target = randint(VOCABULARY, ROWS, LENGTH), randint(VOCABULARY, ROWS, 4, seed=1)
    return {"input_ids": source, "decoder_input_ids": target.roll(1, 1)}, target


def images() -> Batch:
    return {"pixel_values": randn(ROWS, 3, 8, 8)}, randint(5, ROWS)


def token_loss(outputs: object, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())  # type: ignore[attr-defined]


def class_loss(outputs: object, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.logits, targets)  # type: ignore[attr-defined]


def _decoder(model: str, **sizes: object) -> Family:
    """A model named *model*ForCausalLM with ``model.layers``."""
    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
    }

    def make(**changes: object) -> nn.Module:
        import transformers

        stem, suffix = (model.removesuffix("_text"), "Text" if model.endswith("_text") else "")
        config = getattr(transformers, f"{stem}{suffix}Config")(**{**usual, **sizes, **changes})
        return getattr(transformers, f"{stem}ForCausalLM")(config)

    return Family(make, lambda m: m.model.layers, tokens, token_loss)  # type: ignore[union-attr,return-value]


def _gpt2(**changes: object) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": LAYERS,
        "n_head": 2,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **changes}))


def _bert(**changes: object) -> nn.Module:
    import transformers

    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            **{
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 2,
                "max_position_embeddings": 16,
                **changes,
            }
        )
    )


def _t5(**changes: object) -> nn.Module:
    import transformers

    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **{
                "vocab_size": VOCABULARY,
                "d_model": 16,
                "d_kv": 8,
                "d_ff": 24,
                "num_layers": LAYERS // 2,
                "num_heads": 2,
                "relative_attention_num_buckets": 4,
                "relative_attention_max_distance": 8,
                **changes,
            }
        )
    )


def _mamba(**changes: object) -> nn.Module:
    import transformers

    return transformers.MambaForCausalLM(
        transformers.MambaConfig(
            **{
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "state_size": 4,
                "num_hidden_layers": LAYERS,
                "time_step_rank": 2,
                **changes,
            }
        )
    )


def _vit(**changes: object) -> nn.Module:
    import transformers

    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **{
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
                "num_labels": 5,
                **changes,
            }
        )
    )


_EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 1}

FAMILIES = {
    "gpt2": Family(_gpt2, lambda m: m.transformer.h, tokens, token_loss),
    "llama": _decoder("Llama", num_key_value_heads=1),
    "llama-eager": _decoder("Llama", num_key_value_heads=1, attn_implementation="eager"),
    "qwen3": _decoder("Qwen3", num_key_value_heads=1, head_dim=8),
    "gemma2": _decoder("Gemma2", num_key_value_heads=1, head_dim=8, sliding_window=3),
    "gemma3": _decoder(
        "Gemma3_text", num_key_value_heads=1, head_dim=8, sliding_window=3, sliding_window_pattern=2
    ),
    "phi3": _decoder("Phi3", num_key_value_heads=1),
    "bert": Family(_bert, lambda m: m.bert.encoder.layer, tokens, token_loss),
    "t5": Family(_t5, lambda m: [*m.encoder.block, *m.decoder.block], translation, token_loss),
    "mamba": Family(_mamba, lambda m: m.backbone.layers, tokens, token_loss),
    "vit": Family(_vit, lambda m: m.vit.layers, images, class_loss),
    "mixtral": _decoder("Mixtral", num_local_experts=4, **_EXPERTS),
    "qwen3-moe": _decoder(
        "Qwen3Moe", num_experts=4, moe_intermediate_size=8, head_dim=8, **_EXPERTS
    ),
    "deepseek-v3": _decoder(
        "DeepseekV3",
        n_routed_experts=4,
        n_shared_experts=1,
        moe_intermediate_size=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
}
