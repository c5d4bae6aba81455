"""Tiny models of transformers that build masks and then compute with them outside its attention interface.

One dictionary of small sizes fits nearly all of them; only what a family spells in its own way stands beside its name
(as many landmarks as tokens make Nystromformer's attention the plain one; with fewer it takes no mask in any
implementation).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

VOCAB = 40

_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads", "encoder_attention_heads")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "embedding_size", "input_embedding_size", "output_embedding_size")
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
_INNER = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim")
_DROPOUTS = (
    "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout",
    "activation_dropout",
)  # fmt: skip
_SMALL: dict[str, Any] = {
    **dict.fromkeys((*_HEADS, "decoder_attention_heads"), 4),
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_DEPTHS, 2),
    **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(_DROPOUTS, 0.0),
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
    "max_seq_len": 64, "attention_type": "original_full",
}  # fmt: skip

#: model -> (class, what its config spells in its own way)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bark": ("BarkSemanticModel", {"input_vocab_size": VOCAB, "output_vocab_size": VOCAB, "block_size": 64}),
    "big_bird": ("BigBirdForMaskedLM", {}),
    "bloom": ("BloomForCausalLM", {}),
    "canine": (
        "CanineModel",
        {"downsampling_rate": 2, "local_transformer_stride": 8, "attend_from_chunk_width": 8,
         "attend_to_chunk_width": 8, "upsampling_kernel_size": 3, "num_hash_buckets": 50, "num_hash_functions": 4},
    ),
    "clvp": ("ClvpForCausalLM", {}),
    "convbert": ("ConvBertForMaskedLM", {"head_ratio": 2, "conv_kernel_size": 3}),
    "falcon": ("FalconForCausalLM", {"alibi": False}),
    "flava": ("FlavaTextModel", {}),
    "gpt_neo": ("GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gpt_neox_japanese": ("GPTNeoXJapaneseForCausalLM", {}),
    "groupvit": ("GroupViTTextModel", {}),
    "ibert": ("IBertForMaskedLM", {"quant_mode": False}),
    "led": (
        "LEDForConditionalGeneration",
        {"attention_window": [4, 4], "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    ),
    "longformer": ("LongformerForMaskedLM", {"attention_window": [4, 4]}),
    "luke": ("LukeForMaskedLM", {"entity_vocab_size": 20, "entity_emb_size": 8}),
    "megatron_bert": ("MegatronBertForMaskedLM", {}),
    "mpnet": ("MPNetForMaskedLM", {}),
    "mpt": ("MptForCausalLM", {}),
    "mvp": ("MvpForConditionalGeneration", {}),
    "nystromformer": ("NystromformerForMaskedLM", {"num_landmarks": 12, "segment_means_seq_len": 12}),
    "rembert": ("RemBertForMaskedLM", {}),
    "roformer": ("RoFormerForMaskedLM", {}),
    "squeezebert": ("SqueezeBertForMaskedLM", {}),
    "tapas": (
        "TapasForMaskedLM",
        {"type_vocab_sizes": [3, 4, 4, 2, 4, 10, 10], "max_column_id": 4, "max_row_id": 4},
    ),
    "trocr": ("TrOCRForCausalLM", {}),
    "visual_bert": ("VisualBertModel", {"visual_embedding_dim": 8}),
    "vits": ("VitsModel", {"window_size": 2, "flow_size": 16}),
    "xglm": ("XGLMForCausalLM", {}),
}  # fmt: skip


def build(model: str, implementation: str) -> Any:
    """The same weights for each implementation, in eval mode."""
    class_name, own = MODELS[model]
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    model_class = getattr(module, class_name)
    known = model_class.config_class()
    options = {name: value for name, value in _SMALL.items() if hasattr(known, name)}
    torch.manual_seed(0)
    config = model_class.config_class(**{**options, **own})
    made = model_class._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.eval()


def outputs(model: Any) -> list[Tensor]:
    """What it gives for a batch padded left and one padded right: at real tokens, or at all where lengths change."""
    tokens = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    seen = []
    for gone in (slice(0, 4), slice(8, 12)):
        words, mask = tokens.clone(), torch.ones_like(tokens)
        words[1, gone] = mask[1, gone] = 0
        call = {"input_ids": words, "attention_mask": mask}
        if model.config.is_encoder_decoder:
            call["decoder_input_ids"] = tokens[:, :5]
        torch.manual_seed(0)  # some add noise
        with torch.no_grad():
            out = model(**call)
        named = (getattr(out, name, None) for name in ("logits", "last_hidden_state", "waveform"))
        out = next(tensor for tensor in named if tensor is not None)
        seen.append(out[mask.bool()] if out.shape[:2] == mask.shape else out)
    return seen
