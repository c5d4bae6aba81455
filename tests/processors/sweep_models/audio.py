"""Audio transformers, and the text and token encoders that come with them."""

from __future__ import annotations

from typing import Any

import torch

from sweep_models import Built, case, kept, noise, rotary, times

ACE: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 3,
}
_ACE_MODULE = "diffusers.pipelines.ace_step.modeling_ace_step"


@case("AceStepTransformer1DModel", published={"num_hidden_layers": 2})
def ace_step() -> Built:
    config = {**ACE, "num_hidden_layers": 2, "in_channels": 18, "audio_acoustic_hidden_dim": 6}
    return config, {
        "hidden_states": noise(2, 16, 6),
        "timestep": times(0.9, 0.4),
        "timestep_r": times(0.3, 0.1),
        "encoder_hidden_states": noise(2, 5, 24),
        "context_latents": noise(2, 16, 12),
    }


@case(
    "AceStepConditionEncoder", published={"num_lyric_encoder_hidden_layers": 2, "num_timbre_encoder_hidden_layers": 2}
)
def ace_step_condition() -> Built:
    config = {
        **ACE,
        "text_hidden_dim": 10,
        "timbre_hidden_dim": 6,
        "num_lyric_encoder_hidden_layers": 2,
        "num_timbre_encoder_hidden_layers": 2,
    }
    return config, {
        "text_hidden_states": noise(2, 5, 10),
        "text_attention_mask": kept(5, 3, of=5, dtype=torch.long),
        "lyric_hidden_states": noise(2, 7, 10),
        "lyric_attention_mask": kept(7, 4, of=7, dtype=torch.long),
        "refer_audio_acoustic_hidden_states_packed": noise(2, 6, 6),
        "refer_audio_order_mask": torch.tensor([0, 1]),
    }


@case("AceStepAudioTokenizer", published={"num_attention_pooler_hidden_layers": 1})
def ace_step_tokenizer() -> Built:
    config = {**ACE, "audio_acoustic_hidden_dim": 6, "pool_window_size": 4, "fsq_dim": 24, "fsq_input_levels": [4, 4]}
    return config, {"hidden_states": noise(2, 3, 4, 6)}


@case("AceStepAudioTokenDetokenizer", published={"num_attention_pooler_hidden_layers": 1})
def ace_step_detokenizer() -> Built:
    return {**ACE, "audio_acoustic_hidden_dim": 6, "pool_window_size": 4}, {"hidden_states": noise(2, 3, 24)}


@case("StableAudioDiTModel", published={"num_layers": 1})
def stable_audio() -> Built:
    config = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_attention_heads": 2,
        "cross_attention_dim": 16,
        "time_proj_dim": 8,
        "global_states_input_dim": 10,
        "cross_attention_input_dim": 12,
    }
    return config, {
        "hidden_states": noise(2, 4, 8),
        "timestep": times(0.9, 0.4),
        "encoder_hidden_states": noise(2, 5, 12),
        "global_hidden_states": noise(2, 1, 10),
        "rotary_embedding": rotary(9, 4),
    }


@case("StableAudio3DiTModel", published={"depth": 1}, head_dims=(64,))
def stable_audio_3() -> Built:
    """Differential attention: two attentions per module, one subtracted."""
    config = {
        "io_channels": 6,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "cond_token_dim": 10,
        "global_cond_dim": 12,
        "local_add_cond_dim": 5,
        "timestep_features_dim": 8,
        "ff_mult": 1.0,
        "num_memory_tokens": 3,
    }
    return config, {
        "hidden_states": noise(2, 6, 12),
        "timestep": times(0.9, 0.4),
        "encoder_hidden_states": noise(2, 5, 10),
        "global_hidden_states": noise(2, 12),
    }


@case("LongCatAudioDiTTransformer", published={"dit_depth": 1})
def longcat_audio() -> Built:
    config = {"dit_dim": 32, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 10, "latent_dim": 6, "text_conv": False}
    return config, {
        "hidden_states": noise(2, 9, 6),
        "encoder_hidden_states": noise(2, 5, 10),
        "encoder_attention_mask": kept(5, 3, of=5),
        "timestep": times(0.9, 0.4),
        "attention_mask": kept(9, 6, of=9),
    }


@case("MiniMaxMusic3Transformer1DModel", published={"num_layers": 1})
def minimax_music() -> Built:
    config = {
        "in_channels": 6,
        "condition_dim": 10,
        "num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "ff_inner_dim": 20,
        "rotary_dim": 4,
        "fourier_embedding_dim": 8,
    }
    return config, {
        "hidden_states": noise(2, 6, 11),
        "timestep": times(0.9, 0.4),
        "encoder_hidden_states": noise(2, 11, 10),
    }


@case("MiniMaxMusic3RVQDepthDecoder", published={"num_layers": 1})
def minimax_depth() -> Built:
    config = {
        "hidden_size": 24,
        "num_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 20,
        "audio_vocab_size": 12,
        "num_codebooks": 3,
        "max_position_embeddings": 8,
    }
    return config, {"inputs_embeds": noise(2, 5, 24)}


@case("T5FilmDecoder", published={"num_layers": 1})
def t5_film() -> Built:
    """Attention without the 1/sqrt(head_dim), written out."""
    config = {
        "input_dims": 6,
        "targets_length": 7,
        "d_model": 16,
        "num_layers": 1,
        "num_heads": 2,
        "d_kv": 8,
        "d_ff": 20,
        "dropout_rate": 0.0,
    }
    return config, {
        "encodings_and_masks": [(noise(2, 5, 16), kept(5, 3, of=5))],
        "decoder_input_tokens": noise(2, 7, 6),
        "decoder_noise_time": times(0.9, 0.4),
    }


@case("LTX2TextConnectors", where="diffusers.pipelines.ltx2.connectors", published={})
def ltx2_connectors() -> Built:
    config = {
        "caption_channels": 16,
        "text_proj_in_factor": 2,
        "video_connector_num_attention_heads": 2,
        "video_connector_attention_head_dim": 8,
        "video_connector_num_layers": 1,
        "video_connector_num_learnable_registers": 4,
        "audio_connector_num_attention_heads": 2,
        "audio_connector_attention_head_dim": 8,
        "audio_connector_num_layers": 1,
        "audio_connector_num_learnable_registers": 4,
    }
    return config, {"text_encoder_hidden_states": noise(2, 8, 32), "attention_mask": kept(8, 5, of=8).flip(1).long()}


@case("LTX2DurationHead", where="diffusers.pipelines.ltx2.duration_head", published={})
def ltx2_duration() -> Built:
    config = {
        "video_cross_attention_dim": 10,
        "audio_cross_attention_dim": 8,
        "pooler_hidden_dim": 16,
        "num_pooler_heads": 2,
        "mlp_hidden_dim": 12,
    }
    return config, {"video_tokens": noise(2, 6, 10), "audio_tokens": noise(2, 5, 8)}


@case("AnimaTextConditioner", published={"num_layers": 1})
def anima() -> Built:
    config = {
        "source_dim": 10,
        "target_dim": 12,
        "model_dim": 12,
        "num_layers": 1,
        "num_attention_heads": 2,
        "target_vocab_size": 20,
        "min_sequence_length": 4,
    }
    return config, {
        "source_hidden_states": noise(2, 6, 10),
        "target_input_ids": torch.arange(10).reshape(2, 5),
        "target_attention_mask": kept(5, 3, of=5),
        "source_attention_mask": kept(6, 4, of=6),
    }


@case("UNet1DModel", head_dims=(32,))
def unet_1d() -> Built:
    """Attention written out inside its blocks; 32 channels a head in every release."""
    config = {
        "sample_size": 64,
        "block_out_channels": (32, 32, 64),
        "extra_in_channels": 64,
    }
    return config, {"sample": noise(1, 2, 64), "timestep": times(0.3)}
