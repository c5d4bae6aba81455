"""Tiny random transformers models for tests: fp32, CPU-sized, made from a config and never downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 64


def config(family: str, **changes: Any) -> Any:
    """A config of one of the families below; head dims as small as they may be, but different where the model's are."""
    base = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "attention_dropout": 0.0,
    }
    if family == "llama":
        return transformers.LlamaConfig(**{**base, **changes})
    if family == "mistral":
        return transformers.MistralConfig(**{**base, "sliding_window": 5, **changes})
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 16}
    if family == "gemma2":
        return transformers.Gemma2Config(**{**base, **layers, "query_pre_attn_scalar": 16, **changes})
    if family == "gemma3":
        return transformers.Gemma3TextConfig(**{**base, **layers, "query_pre_attn_scalar": 16, **changes})
    if family == "gpt_oss":
        return transformers.GptOssConfig(
            **{**base, **layers, "num_local_experts": 2, "num_experts_per_tok": 1, **changes}
        )
    if family == "gemma4":  # two different head dims, K = V in global layers
        gemma4 = {"head_dim": 64, "global_head_dim": 128, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        plain = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB}
        return transformers.Gemma4TextConfig(**{**base, **layers, **gemma4, **plain, **changes})
    if family == "gemma4_shared":  # the last two layers reuse keys and values
        shared = {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        }
        return transformers.Gemma4TextConfig(**{**base, **layers, "global_head_dim": 32, **shared, **changes})
    raise KeyError(family)


CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gemma4_shared": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def model(family: str, implementation: str = "eager", **changes: Any) -> Any:
    """The same weights for each call with the same family and changes."""
    torch.manual_seed(0)
    made = getattr(transformers, CLASSES[family])._from_config(
        config(family, **changes), attn_implementation=implementation
    )
    with torch.no_grad():  # sinks and norms start at constants; every parameter should matter
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made.eval()


def batch(padding: str = "none", length: int = 11) -> dict[str, Tensor]:
    """Two rows of tokens; padding: none, left, right, or holes (in the middle of the second row)."""
    tokens = torch.randint(2, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    cut = {"none": None, "left": slice(0, 4), "right": slice(length - 4, length), "holes": slice(3, 6)}[padding]
    if cut is None:
        return {"input_ids": tokens}
    mask[1, cut] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}
