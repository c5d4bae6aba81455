"""The model families of the sweep: tiny, random, fp32, made from a config and never downloaded.

Knows configs and inputs; what is done with them stands in transformers_sweep.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import tiny_transformers as tiny
import torch
import transformers
from torch import Tensor

BASE = {
    "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "attention_dropout": 0.0,
}  # fmt: skip
LATENT = {
    "moe_intermediate_size": 16, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 2,
}  # fmt: skip
SOFTCAP = {"attn_logit_softcapping": 0.1}  # far below the default, as the scores of a tiny model are
HALF_LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
WIDE = {"head_dim": 16}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE = 60  # the token that stands for a piece of an image

Kind = Literal["decoder", "encoder", "seq2seq", "speech", "images"]


@dataclass(frozen=True)
class Family:
    """class_name: a class of transformers, which an older release may lack. config: builds its config.

    inputs: a padding ("none", "left", "right", "holes") -> the model's inputs. generates: the paddings it can generate
    from. first_position: where a document's positions begin.
    """

    class_name: str
    config: Callable[[], Any]
    kind: Kind = "decoder"
    inputs: Callable[[str], dict[str, Tensor]] = tiny.batch
    generates: tuple[str, ...] = ("none", "left")
    first_position: int = 0

    def exists(self) -> bool:
        """Whether the installed transformers has this family."""
        return hasattr(transformers, self.class_name)

    def build(self, implementation: str) -> Any:
        """The model in eval mode; the same weights for each implementation."""
        config = self.config()
        torch.manual_seed(0)
        model = getattr(transformers, self.class_name)._from_config(config, attn_implementation=implementation)
        with torch.no_grad():  # sinks and norms start at constants; every parameter should matter
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model.eval()


def _decoder(class_name: str, **changes: Any) -> Family:
    return Family(class_name, lambda: getattr(transformers, class_name).config_class(**{**BASE, **changes}))


def _gemma4(base: str = "gemma4", **changes: Any) -> Family:
    return Family("Gemma4ForCausalLM", lambda: tiny.config(base, **changes))


def _encoder(class_name: str, **changes: Any) -> Family:
    def config() -> Any:
        kept = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
        return getattr(transformers, class_name).config_class(**{**kept, **changes})

    return Family(class_name, config, "encoder")


def _seq2seq_inputs(padding: str) -> dict[str, Tensor]:
    decoder = torch.randint(2, tiny.VOCAB, (2, 5), generator=torch.Generator().manual_seed(4))
    return {**tiny.batch(padding), "decoder_input_ids": decoder}


def _seq2seq(class_name: str, **options: Any) -> Family:
    common = {"vocab_size": tiny.VOCAB, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 1}
    return Family(
        class_name,
        lambda: getattr(transformers, class_name).config_class(**{**common, **options}),
        "seq2seq",
        _seq2seq_inputs,
    )


def _t5gemma_config() -> Any:
    module = transformers.T5GemmaModuleConfig(**{**BASE, **HALF_LOCAL, **SOFTCAP, "head_dim": 16})
    options = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "vocab_size": tiny.VOCAB}
    return transformers.T5GemmaConfig(encoder=module, decoder=module.to_dict(), **options)


def _whisper_config() -> Any:
    return transformers.WhisperConfig(
        vocab_size=tiny.VOCAB, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=10,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1, dropout=0.0, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip


def _speech_inputs(padding: str) -> dict[str, Tensor]:
    sound = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(5))
    text = tiny.batch(padding, length=7)
    inputs = {"input_features": sound, "decoder_input_ids": text["input_ids"]}
    if "attention_mask" in text:
        inputs["decoder_attention_mask"] = text["attention_mask"]
    return inputs


# --- text with images ---

_LAYOUT = torch.tensor([2, 57] + [IMAGE] * 4 + [58, 9, 10, 57] + [IMAGE] * 4 + [58, 3, 4])  # two images in a text
_SIGLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def _image_inputs(type_ids: str, pixels: bool = True) -> Callable[[str], dict[str, Tensor]]:
    def inputs(padding: str) -> dict[str, Tensor]:
        words = torch.randint(2, 50, (2, len(_LAYOUT) + 4), generator=torch.Generator().manual_seed(6))
        mask = torch.ones_like(words)
        for row in range(2):
            begin = 4 if padding == "left" else 0
            words[row, begin : begin + len(_LAYOUT)] = _LAYOUT
        if padding != "none":
            gone = {"left": slice(0, 4), "right": slice(-4, None), "holes": slice(-3, -1)}[padding]
            mask[1, gone], words[1, gone] = 0, 0
        made = {"input_ids": words, "attention_mask": mask, type_ids: (words == IMAGE).long()}
        if pixels:
            made["pixel_values"] = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(7))
        return made

    return inputs


def _gemma3_images() -> Any:
    return transformers.Gemma3Config(
        text_config=tiny.config("gemma3").to_dict(), vision_config=_SIGLIP, mm_tokens_per_image=4,
        image_token_index=IMAGE, boi_token_index=57, eoi_token_index=58,
    )  # fmt: skip


def _gemma4_images() -> Any:
    text = tiny.config("gemma4", use_bidirectional_attention="vision")
    config = transformers.Gemma4Config(text_config=text, image_token_id=61, video_token_id=62, audio_token_id=63)
    config.vision_config = config.audio_config = None  # image tokens are told by mm_token_type_ids alone
    return config


def _paligemma() -> Any:
    text = transformers.GemmaConfig(**{**BASE, "head_dim": 16, "num_key_value_heads": 1})
    return transformers.PaliGemmaConfig(
        text_config=text, vision_config=transformers.SiglipVisionConfig(**_SIGLIP), image_token_id=IMAGE,
        projection_dim=32, hidden_size=32,
    )  # fmt: skip


def _prefix_inputs(padding: str) -> dict[str, Tensor]:
    """One image and a prefix that see each other both ways, then a suffix."""
    words = torch.randint(2, 50, (2, 13), generator=torch.Generator().manual_seed(8))
    suffix, mask = torch.zeros_like(words), torch.ones_like(words)
    begin = 4 if padding == "left" else 0
    words[:, begin : begin + 4] = IMAGE
    suffix[:, -5:] = 1
    if padding != "none":
        gone = {"left": slice(0, 4), "right": slice(-3, None), "holes": slice(-4, -2)}[padding]
        mask[1, gone], words[1, gone] = 0, 0
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    return {"input_ids": words, "attention_mask": mask, "token_type_ids": suffix, "pixel_values": pixels}


FAMILIES: dict[str, Family] = {
    "llama": _decoder("LlamaForCausalLM"),
    "mistral": _decoder("MistralForCausalLM", sliding_window=5),
    "mixtral": _decoder("MixtralForCausalLM", **EXPERTS),
    "qwen2": _decoder("Qwen2ForCausalLM"),
    "qwen3": _decoder("Qwen3ForCausalLM", **WIDE),
    "qwen3_moe": _decoder(
        "Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **WIDE
    ),
    "phi3": _decoder("Phi3ForCausalLM", sliding_window=5),
    "smollm3": _decoder("SmolLM3ForCausalLM"),
    "starcoder2": _decoder("Starcoder2ForCausalLM", residual_dropout=0.0, embedding_dropout=0.0, sliding_window=5),
    "stablelm": _decoder("StableLmForCausalLM"),
    "olmo3": _decoder("Olmo3ForCausalLM", **HALF_LOCAL),
    "cohere2": _decoder("Cohere2ForCausalLM", **HALF_LOCAL),
    "exaone4": _decoder("Exaone4ForCausalLM", **HALF_LOCAL),
    "glm4": _decoder("Glm4ForCausalLM", head_dim=8),
    "granite": _decoder("GraniteForCausalLM"),
    "granite_swa": _decoder("GraniteSWAForCausalLM", **HALF_LOCAL),
    "gpt2": _decoder("GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0),
    "opt": _decoder("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    "gemma": _decoder("GemmaForCausalLM", **WIDE),
    "gemma2": _decoder("Gemma2ForCausalLM", **SOFTCAP, **WIDE, **HALF_LOCAL),
    "vaultgemma": _decoder("VaultGemmaForCausalLM", **SOFTCAP, **WIDE, **HALF_LOCAL),
    "gemma3": _decoder("Gemma3ForCausalLM", **WIDE, **HALF_LOCAL),
    "gemma3_bidirectional": _decoder("Gemma3ForCausalLM", use_bidirectional_attention=True, **WIDE, **HALF_LOCAL),
    "gemma3n": _decoder(
        "Gemma3nForCausalLM", num_kv_shared_layers=2, num_hidden_layers=4, intermediate_size=[48] * 4,
        layer_types=HALF_LOCAL["layer_types"] * 2, sliding_window=5, laurel_rank=4, altup_num_inputs=2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=tiny.VOCAB, activation_sparsity_pattern=[0.0] * 4,
        **WIDE,
    ),
    "gemma4": _gemma4(),
    "gemma4_shared": _gemma4("gemma4_shared"),
    "gemma4_bidirectional": _gemma4(use_bidirectional_attention="all"),
    "gemma4_moe": _gemma4(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16),
    "gpt_oss": _decoder("GptOssForCausalLM", **WIDE, **HALF_LOCAL, **EXPERTS),
    "llama4": _decoder(
        "Llama4ForCausalLM", head_dim=16, num_local_experts=2, attention_chunk_size=4, intermediate_size_mlp=48,
        no_rope_layers=[1, 0], layer_types=["chunked_attention", "full_attention"],
    ),
    "deepseek_v3": _decoder("DeepseekV3ForCausalLM", **LATENT),
    "deepseek_v32": _decoder(
        "DeepseekV32ForCausalLM", index_topk=4, index_n_heads=2, index_head_dim=16, **LATENT
    ),
    "deepseek_v4": _decoder(
        "DeepseekV4ForCausalLM", head_dim=16, num_key_value_heads=1, moe_intermediate_size=16, n_routed_experts=4,
        q_lora_rank=16, num_experts_per_tok=2, sliding_window=5, index_topk=2, index_n_heads=2, index_head_dim=16,
        qk_rope_head_dim=8, o_lora_rank=8, o_groups=2,
    ),
    "mimo_v2_flash": _decoder(
        "MiMoV2FlashForCausalLM", head_dim=16, v_head_dim=8, n_routed_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, swa_head_dim=16, swa_v_head_dim=8, swa_num_attention_heads=4,
        swa_num_key_value_heads=2, **HALF_LOCAL,
    ),
    "minimax_m3": replace(
        _decoder(
            "MiniMaxM3VLForCausalLM", head_dim=16, index_n_heads=2, index_head_dim=16, index_block_size=2,
            index_topk_blocks=2, dense_intermediate_size=48, shared_intermediate_size=16, rotary_dim=8,
            layer_types=["minimax_m3_sparse", "full_attention"], mlp_layer_types=["dense", "dense"], **EXPERTS,
        ),
        generates=("none",),  # left padding shifts its blocks, and leaves rows without any key
    ),
    "bert": _encoder("BertForMaskedLM", **NO_DROPOUT),
    "roberta": replace(_encoder("RobertaForMaskedLM", **NO_DROPOUT), first_position=1),
    "modernbert": _encoder("ModernBertForMaskedLM", local_attention=4, global_attn_every_n_layers=2, eos_token_id=2,
                           cls_token_id=1, sep_token_id=2),
    "t5": _seq2seq("T5ForConditionalGeneration", d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
                   dropout_rate=0.0),
    "bart": _seq2seq("BartForConditionalGeneration", d_model=16, encoder_layers=2, decoder_layers=2,
                     encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
                     max_position_embeddings=64, dropout=0.0, bos_token_id=1, forced_eos_token_id=None),
    "t5gemma": Family("T5GemmaForConditionalGeneration", _t5gemma_config, "seq2seq", _seq2seq_inputs),
    "whisper": Family("WhisperForConditionalGeneration", _whisper_config, "speech", _speech_inputs),
    "gemma3_images": Family(
        "Gemma3ForConditionalGeneration", _gemma3_images, "images", _image_inputs("token_type_ids")
    ),
    "gemma4_images": Family(
        "Gemma4ForConditionalGeneration", _gemma4_images, "images", _image_inputs("mm_token_type_ids", pixels=False)
    ),
    "paligemma": Family("PaliGemmaForConditionalGeneration", _paligemma, "images", _prefix_inputs),
}  # fmt: skip
