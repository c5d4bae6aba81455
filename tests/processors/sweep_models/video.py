"""Video transformers."""

from __future__ import annotations

from typing import Any

import diffusers
import diffusers_models as tiny
import torch

from sweep_models import Built, case, kept, noise, times

case("WanTransformer3DModel", published={"num_layers": 1})(tiny.wan)
case("CogVideoXTransformer3DModel", published={"num_layers": 1})(tiny.cogvideox)
case("HunyuanVideoTransformer3DModel", published={"num_layers": 1, "num_single_layers": 1})(tiny.hunyuan_video)
case("LTXVideoTransformer3DModel", published={"num_layers": 1})(tiny.ltx)
case("MochiTransformer3DModel", published={"num_layers": 2})(tiny.mochi)
case("CosmosTransformer3DModel", published={"num_layers": 1})(tiny.cosmos)

#: What the models built on Wan's blocks share.
WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 10,
    "freq_dim": 16,
    "ffn_dim": 20,
    "num_layers": 1,
    "cross_attn_norm": True,
    "rope_max_seq_len": 16,
}


def wan_inputs(frames: int = 2, channels: int = 4) -> dict[str, Any]:
    return {
        "hidden_states": noise(1, channels, frames, 8, 8),
        "timestep": torch.tensor([7]),
        "encoder_hidden_states": noise(1, 6, 10),
    }


@case("WanTransformer3DModel", variant="image to video")
def wan_i2v() -> Built:
    """Image tokens come through keys and values of their own; the model counts 512 text tokens from the end."""
    return {**WAN, "image_dim": 8, "added_kv_proj_dim": 24}, {
        **wan_inputs(),
        "encoder_hidden_states": noise(1, 512, 10),
        "encoder_hidden_states_image": noise(1, 5, 8),
    }


@case("WanVACETransformer3DModel", published={"num_layers": 1, "vace_layers": [0]})
def wan_vace() -> Built:
    return {**WAN, "num_layers": 2, "vace_layers": [0], "vace_in_channels": 6}, {
        **wan_inputs(),
        "control_hidden_states": noise(1, 6, 2, 8, 8),
    }


@case("WanAnimateTransformer3DModel", published={"num_layers": 1})
def wan_animate() -> Built:
    config = {
        **WAN,
        "num_layers": 2,
        "in_channels": 12,
        "latent_channels": 4,
        "image_dim": 8,
        "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
        "motion_encoder_size": 16,
        "motion_style_dim": 6,
        "motion_dim": 4,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 1,
    }
    return config, {
        **wan_inputs(frames=3, channels=12),
        "encoder_hidden_states_image": noise(1, 5, 8),
        "pose_hidden_states": noise(1, 4, 2, 8, 8),
        "face_pixel_values": noise(1, 3, 5, 16, 16),
    }


@case("WanAnimate2Transformer3DModel", published={"num_layers": 1})
def wan_animate_2() -> Built:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    config = {
        "text_len": 8,
        "in_dim": 12,
        "dim": 64,
        "ffn_dim": 48,
        "freq_dim": 16,
        "text_dim": 10,
        "out_dim": 4,
        "num_heads": 2,
        "num_layers": 1,
    }
    return config, {
        "hidden_states": [noise(4, 2, 4, 4)],
        "timestep": times(7.0),
        "encoder_hidden_states": [noise(6, 10)],
        "condition_latents": [noise(8, 2, 4, 4)],
        "encoder_hidden_states_image": noise(1, 4, 1280),
        "kv_cache": WanAnimate2KVCache(1),
        "kv_cache_mode": "extract",
        "seq_len": 8,
        "offset_grid_sizes": torch.zeros(1, 3, dtype=torch.long),
    }


@case("SkyReelsV2Transformer3DModel", published={"num_layers": 1})
def skyreels() -> Built:
    return WAN, wan_inputs()


@case("ChronoEditTransformer3DModel", published={"num_layers": 1})
def chronoedit() -> Built:
    return WAN, wan_inputs()


@case("HeliosTransformer3DModel", published={"num_layers": 1})
def helios() -> Built:
    config = {**WAN, "rope_dim": (4, 4, 4), "is_amplify_history": True}
    del config["rope_max_seq_len"]
    return config, {
        **wan_inputs(),
        "indices_hidden_states": torch.arange(6, 8)[None].float(),
        "indices_latents_history_short": torch.tensor([[5.0]]),
        "indices_latents_history_mid": torch.tensor([[4.0]]),
        "indices_latents_history_long": torch.arange(4)[None].float(),
        "latents_history_short": noise(1, 4, 1, 8, 8),
        "latents_history_mid": noise(1, 4, 1, 8, 8),
        "latents_history_long": noise(1, 4, 4, 8, 8),
    }


ANYFLOW: dict[str, Any] = {**WAN, "gate_value": 0.25, "deltatime_type": "r"}


def anyflow_inputs(frames: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(1, frames, 4, 8, 8),
        "timestep": times(700.0).expand(1, frames),
        "r_timestep": times(300.0).expand(1, frames),
        "encoder_hidden_states": noise(1, 6, 10),
    }


@case("AnyFlowTransformer3DModel", published={"num_layers": 1})
def anyflow() -> Built:
    return ANYFLOW, anyflow_inputs(2)


@case("AnyFlowFARTransformer3DModel", published={"num_layers": 1}, flex=True)
def anyflow_far() -> Built:
    return ANYFLOW, {**anyflow_inputs(4), "chunk_partition": [2, 2]}


@case("AllegroTransformer3DModel", published={"num_layers": 1})
def allegro() -> Built:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "cross_attention_dim": 24,
        "sample_height": 8,
        "sample_width": 8,
        "sample_frames": 4,
        "caption_channels": 10,
    }
    return config, {
        "hidden_states": noise(2, 4, 2, 8, 8),
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": noise(2, 6, 10),
        "encoder_attention_mask": kept(6, 4, of=6, dtype=torch.long),
        "attention_mask": torch.ones(2, 2, 8, 8, dtype=torch.long),
    }


@case(
    "LatteTransformer3DModel",
    published={
        "in_channels": 4,
        "patch_size": 2,
        "cross_attention_dim": 1152,
        "attention_head_dim": 72,
        "caption_channels": 4096,
        "norm_type": "ada_norm_single",
        "num_embeds_ada_norm": 1000,
    },
)
def latte() -> Built:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 1,
        "cross_attention_dim": 16,
        "attention_bias": True,
        "sample_size": 8,
        "patch_size": 2,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 10,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "caption_channels": 10,
        "video_length": 2,
    }
    return config, {
        "hidden_states": noise(2, 4, 2, 8, 8),
        "timestep": torch.tensor([1, 9]),
        "encoder_hidden_states": noise(2, 6, 10),  # a mask would need one row per frame, which the model does not make
    }


@case("ConsisIDTransformer3DModel", published={"num_layers": 1})
def consisid() -> Built:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 6,
        "text_embed_dim": 10,
        "num_layers": 1,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 5,
        "max_text_seq_length": 6,
        "cross_attn_interval": 1,
        "is_train_face": True,
        "cross_attn_dim_head": 4,
        "cross_attn_num_heads": 2,
        "LFE_id_dim": 6,
        "LFE_vit_dim": 6,
        "LFE_depth": 5,
        "LFE_dim_head": 4,
        "LFE_num_heads": 2,
        "LFE_num_id_token": 1,
        "LFE_num_querie": 2,
        "LFE_output_dim": 21,
        "LFE_ff_mult": 1,
        "LFE_num_scale": 1,
    }
    return config, {
        "hidden_states": noise(2, 2, 4, 8, 8),
        "encoder_hidden_states": noise(2, 6, 10),
        "timestep": torch.tensor([3, 700]),
        "id_cond": noise(2, 6),
        "id_vit_hidden": [noise(2, 3, 6)],
    }


@case(
    "EasyAnimateTransformer3DModel", published={"in_channels": 16, "out_channels": 16, "patch_size": 2, "num_layers": 1}
)
def easyanimate() -> Built:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "patch_size": 2,
        "sample_width": 8,
        "sample_height": 8,
        "num_layers": 1,
        "mmdit_layers": 1,
        "time_embed_dim": 6,
        "text_embed_dim": 10,
    }
    return config, {
        "hidden_states": noise(2, 4, 2, 16, 16),
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": noise(2, 6, 10),
    }


HUNYUAN: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "patch_size": 1,
    "patch_size_t": 1,
    "text_embed_dim": 12,
    "rope_axes_dim": (2, 2, 4),
}


@case("HunyuanVideoTransformer3DModel", variant="token replace")
def hunyuan_video_i2v() -> Built:
    config = {
        **HUNYUAN,
        "num_single_layers": 1,
        "pooled_projection_dim": 6,
        "guidance_embeds": False,
        "image_condition_type": "token_replace",
    }
    return config, {
        "hidden_states": noise(2, 4, 2, 4, 4),
        "timestep": times(3.0, 700.0),
        "encoder_hidden_states": noise(2, 6, 12),
        "encoder_attention_mask": kept(6, 4, of=6),
        "pooled_projections": noise(2, 6),
    }


@case("HunyuanVideo15Transformer3DModel", published={"num_layers": 1})
def hunyuan_video_15() -> Built:
    config = {**HUNYUAN, "mlp_ratio": 2.0, "text_embed_2_dim": 10, "image_embed_dim": 14, "target_size": 16}
    return config, {
        "hidden_states": noise(2, 4, 1, 4, 4),
        "timestep": times(3.0, 700.0),
        "encoder_hidden_states": noise(2, 6, 12),
        "encoder_attention_mask": kept(6, 4, of=6, dtype=torch.float32),
        "encoder_hidden_states_2": noise(2, 5, 10),
        "encoder_attention_mask_2": kept(2, 5, of=5, dtype=torch.float32),
        "image_embeds": noise(2, 3, 14),
    }


@case("HunyuanVideoFramepackTransformer3DModel", published={"num_layers": 1, "num_single_layers": 1})
def framepack() -> Built:
    config = {
        **HUNYUAN,
        "patch_size": 2,
        "num_single_layers": 1,
        "pooled_projection_dim": 6,
        "has_image_proj": True,
        "image_proj_dim": 10,
        "has_clean_x_embedder": True,
    }
    return config, {
        "hidden_states": noise(1, 4, 2, 4, 4),
        "timestep": torch.tensor([7]),
        "encoder_hidden_states": noise(1, 6, 12),
        "encoder_attention_mask": kept(5, of=6),
        "pooled_projections": noise(1, 6),
        "image_embeds": noise(1, 5, 10),
        "indices_latents": torch.arange(10, 12),
        "guidance": torch.tensor([6000]),
        "latents_clean": noise(1, 4, 2, 4, 4),
        "indices_latents_clean": torch.tensor([0, 9]),
        "latents_history_2x": noise(1, 4, 2, 4, 4),
        "indices_latents_history_2x": torch.tensor([7, 8]),
        "latents_history_4x": noise(1, 4, 4, 4, 4),
        "indices_latents_history_4x": torch.arange(3, 7),
    }


LTX2: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8,
    "num_layers": 1,
    "caption_channels": 10,
    "rope_double_precision": False,
}


def ltx2_inputs() -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 2 * 4 * 4, 4),
        "audio_hidden_states": noise(2, 5, 4),
        "encoder_hidden_states": noise(2, 6, 10),
        "audio_encoder_hidden_states": noise(2, 6, 10),
        "timestep": times(3.0, 700.0),
        "encoder_attention_mask": kept(6, 4, of=6),
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "audio_num_frames": 5,
    }


@case("LTX2VideoTransformer3DModel", published={"num_layers": 1})
def ltx2() -> Built:
    return LTX2, ltx2_inputs()


@case("LTX2VideoTransformer3DModel", variant="perturbed")
def ltx2_perturbed() -> Built:
    return {**LTX2, "perturbed_attn": True}, {
        **ltx2_inputs(),
        "spatio_temporal_guidance_blocks": [0],
        "perturbation_mask": times(1.0, 0.0),
    }


@case("SanaVideoTransformer3DModel", published={"num_layers": 1})
def sana_video() -> Built:
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 1,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 12,
        "cross_attention_dim": 24,
        "caption_channels": 10,
        "sample_size": 8,
        "rope_max_seq_len": 16,
    }
    return config, {
        "hidden_states": noise(2, 4, 2, 8, 8),
        "encoder_hidden_states": noise(2, 6, 10),
        "timestep": torch.tensor([3, 700]),
        "encoder_attention_mask": kept(6, 4, of=6),
    }


KANDINSKY: dict[str, Any] = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 10,
    "in_text_dim2": 6,
    "time_dim": 12,
    "model_dim": 24,
    "ff_dim": 16,
    "num_text_blocks": 1,
    "num_visual_blocks": 1,
    "axes_dims": (4, 4, 4),
}


@case("Kandinsky5Transformer3DModel", published={"num_text_blocks": 1, "num_visual_blocks": 1})
def kandinsky5() -> Built:
    return KANDINSKY, {
        "hidden_states": noise(1, 2, 4, 4, 4),
        "encoder_hidden_states": noise(1, 6, 10),
        "timestep": times(700.0),
        "pooled_projections": noise(1, 6),
        "visual_rope_pos": [torch.arange(2), torch.arange(2), torch.arange(2)],
        "text_rope_pos": torch.arange(6),
    }


@case("Kandinsky6Transformer3DModel", published={"num_text_blocks": 1, "num_visual_blocks": 1})
def kandinsky6() -> Built:
    config = {**KANDINSKY, "in_audio_dim": 5, "out_audio_dim": 5, "visual_cond": False}
    return config, {
        "hidden_states": noise(1, 2, 4, 4, 4),
        "encoder_hidden_states": noise(1, 6, 10),
        "pooled_projections": noise(1, 6),
        "timestep": times(700.0),
        "audio_hidden_states": noise(1, 7, 5),
    }


@case("Kandinsky6SRTransformer3DModel", published={"num_visual_blocks": 1}, flex=True)
def kandinsky6_sr() -> Built:
    config = {
        "in_visual_dim": 4,
        "out_visual_dim": 6,
        "time_dim": 12,
        "model_dim": 24,
        "ff_dim": 16,
        "num_visual_blocks": 1,
        "axes_dims": (4, 4, 4),
    }
    return config, {"hidden_states": noise(1, 2, 8, 8, 9), "timestep": times(700.0)}


@case("MiniMaxH3Transformer3DModel", published={"num_layers": 1})
def minimax_h3() -> Built:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "hidden_size": 20,
        "num_layers": 1,
        "num_refiner_layers": 1,
        "ffn_dim": 24,
        "in_channels": 4,
        "audio_in_channels": 6,
        "text_dim": 10,
        "freq_dim": 8,
        "time_embed_hidden_dim": 20,
        "time_embed_dim": 12,
        "rope_freq_dim": 2,
    }
    video, audio, text = 8, 5, 4
    total = video + audio + text
    return config, {
        "hidden_states": noise(2, video, 16),
        "audio_hidden_states": noise(2, audio, 6),
        "encoder_hidden_states": noise(2, text, 10),
        "timestep": times(0.0, 700.0),
        "timestep_indices": torch.tensor([0] * text + [1] * (video + audio)),
        "token_tags": torch.tensor([0] * text + [1] * video + [2] * audio),
        "position_ids": torch.arange(total)[:, None].expand(total, 3).float(),
        "text_indices": torch.arange(text),
        "video_indices": torch.arange(text, text + video),
        "audio_indices": torch.arange(text + video, total),
    }


@case("MotifVideoTransformer3DModel", published={"num_layers": 1, "num_single_layers": 1})
def motif() -> Built:
    config = {
        "in_channels": 5,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 1,
        "num_single_layers": 1,
        "patch_size": 2,
        "text_embed_dim": 10,
        "image_embed_dim": 6,
        "rope_axes_dim": (4, 4, 4),
    }
    return config, {
        "hidden_states": noise(2, 5, 2, 4, 4),
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": noise(2, 6, 10),
        "encoder_attention_mask": kept(6, 4, of=6),
        "image_embeds": noise(2, 3, 6),
    }


@case("Cosmos3OmniTransformer", published={"num_hidden_layers": 1})
def cosmos3() -> Built:
    config = {
        "dtype": "float32",
        "head_dim": 12,
        "hidden_size": 24,
        "intermediate_size": 20,
        "latent_channel": 4,
        "latent_patch_size": 1,
        "patch_latent_dim": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "rope_axes_dim": [2, 2, 2],
        "vocab_size": 30,
    }
    text, side = 3, 2
    total = text + side * side
    return config, {
        "input_ids": torch.arange(text),
        "text_indexes": torch.arange(text),
        "position_ids": torch.arange(total).expand(3, total),
        "und_len": text,
        "sequence_length": total,
        "vision_tokens": [noise(1, 4, 1, side, side)],
        "vision_token_shapes": [(1, side, side)],
        "vision_sequence_indexes": torch.arange(text, total),
        "vision_mse_loss_indexes": torch.arange(text, total),
        "vision_timesteps": times(*[700.0] * side * side),
        "vision_noisy_frame_indexes": [torch.tensor([0])],
    }


SANA_WM: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "softmax_every_n": 2,
    "linear_head_dim": 16,
    "caption_channels": 10,
    "mlp_ratio": 1.5,
    "image_size": 8,
}


@case("SanaWMTransformer3DModel", published={"num_layers": 4}, head_dims=(112,))
def sana_wm() -> Built:
    return SANA_WM, {
        "hidden_states": noise(1, 4, 3, 4, 4),
        "timestep": times(1.0, 300.0, 700.0).reshape(1, 1, 3),
        "encoder_hidden_states": noise(1, 1, 6, 10),
        "mask": kept(4, of=6, dtype=torch.long),
        "camera_conditions": torch.cat(
            [torch.eye(4).reshape(1, 1, 16).expand(1, 3, 16), times(4, 4, 2, 2).expand(1, 3, 4)], -1
        ),
    }


@case("SanaWMLTX2RefinerTransformer3DModel", published={"num_layers": 1})
def sana_wm_refiner() -> Built:
    model = diffusers.SanaWMLTX2RefinerTransformer3DModel(**LTX2)
    return model, {
        "hidden_states": noise(2, 2 * 4 * 4, 4),
        "encoder_hidden_states": noise(2, 6, 10),
        "timestep": times(3.0, 700.0)[:, None].expand(2, 32),
        "video_rotary_emb": tuple(noise(2, 32, 16) for _ in range(2)),
        "encoder_attention_mask": kept(6, 4, of=6),
    }
