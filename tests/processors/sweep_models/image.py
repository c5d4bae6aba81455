"""Image transformers."""

from __future__ import annotations

from typing import Any

import diffusers_models as tiny
import torch

from sweep_models import Built, case, grid_ids, kept, noise, rotary, text_ids, times

case("FluxTransformer2DModel", published={})(tiny.flux)
case("Flux2Transformer2DModel", published={})(tiny.flux2)
case("ChromaTransformer2DModel", published={})(tiny.chroma)
case("SD3Transformer2DModel", published={"num_attention_heads": 24, "num_layers": 2})(tiny.sd3)
case("QwenImageTransformer2DModel", published={"num_layers": 2})(tiny.qwen_image)
case("PixArtTransformer2DModel", published={"num_layers": 2})(tiny.pixart)
case("ZImageTransformer2DModel", published={})(tiny.z_image)
case("Lumina2Transformer2DModel", published={"num_layers": 2})(tiny.lumina2)
case("SanaTransformer2DModel", published={"num_layers": 2})(tiny.sana)

#: What the two-stream families share.
STREAMS: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "joint_attention_dim": 20,
    "axes_dims_rope": [4, 4, 4],
}


def streams(batch: int = 2, text: int = 7, side: int = 4, channels: int = 4, width: int = 20) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, side * side, channels),
        "encoder_hidden_states": noise(batch, text, width),
        "timestep": times(0.9, 0.4)[:batch],
        "img_ids": grid_ids(side, side),
        "txt_ids": text_ids(text),
    }


@case("BriaTransformer2DModel", published={})
def bria() -> Built:
    return {**STREAMS, "pooled_projection_dim": None}, streams()


@case("BriaFiboTransformer2DModel", published={})
def bria_fibo() -> Built:
    config = {**STREAMS, "in_channels": 12, "joint_attention_dim": 24, "text_encoder_dim": 12}
    return config, {
        **streams(1, channels=12, width=24),
        "text_encoder_layers": [noise(1, 7, 12) for _ in range(2)],
    }


@case("OvisImageTransformer2DModel", published={})
def ovis() -> Built:
    return {**STREAMS, "out_channels": 4}, streams()


@case("LongCatImageTransformer2DModel", published={})
def longcat_image() -> Built:
    return {**STREAMS, "pooled_projection_dim": 20}, streams()


@case("Flux3Transformer2DModel", published={})
def flux3() -> Built:
    config = {
        "in_channels": 8,
        "cond_in_channels": 8,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 20,
        "timestep_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
    }
    return config, {
        "hidden_states": noise(2, 16, 8),
        "encoder_hidden_states": noise(2, 7, 20),
        "timestep": times(0.9, 0.4),
        "img_ids": grid_ids(4, 4, axes=4),
        "txt_ids": text_ids(7, axes=4),
    }


@case("AuraFlowTransformer2DModel", published={"num_mmdit_layers": 1, "num_single_dit_layers": 1}, gain=2.0)
def auraflow() -> Built:
    config = {
        "sample_size": 8,
        "in_channels": 4,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "caption_projection_dim": 24,
        "joint_attention_dim": 20,
        "pos_embed_max_size": 16,
    }
    return config, {
        "hidden_states": noise(2, 4, 8, 8),
        "encoder_hidden_states": noise(2, 9, 20),
        "timestep": times(0.3, 0.8),
    }


COGVIEW: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "text_embed_dim": 10,
    "time_embed_dim": 12,
    "condition_dim": 4,
}


def crops() -> dict[str, Any]:
    return {name: torch.tensor([[8, 8], [8, 6]]) for name in ("original_size", "target_size", "crop_coords")}


def cogview_inputs() -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, 8, 8),
        "encoder_hidden_states": noise(2, 6, 10),
        "timestep": torch.tensor([3, 700]),
        **crops(),
    }


@case("CogView3PlusTransformer2DModel", published={"num_layers": 1})
def cogview3() -> Built:
    return {**COGVIEW, "pos_embed_max_size": 8, "sample_size": 8}, cogview_inputs()


@case("CogView4Transformer2DModel", published={"num_layers": 1})
def cogview4() -> Built:
    mask = kept(6, 4, of=6, dtype=torch.long)
    return {**COGVIEW, "rope_axes_dim": (16, 16)}, {**cogview_inputs(), "attention_mask": mask}


@case("GlmImageTransformer2DModel", published={"num_layers": 1})
def glm_image() -> Built:
    sizes = {name: times(8.0, 6.0)[None].expand(2, -1) for name in ("target_size", "crop_coords")}
    return {**COGVIEW, "prior_vq_quantizer_codebook_size": 32}, {
        "hidden_states": noise(2, 4, 8, 8),
        "encoder_hidden_states": noise(2, 6, 10),
        "prior_token_id": torch.arange(32).reshape(2, 16),
        "prior_token_drop": torch.tensor([[False], [True]]).expand(2, 16),
        "timestep": torch.tensor([3, 700]),
        **sizes,
    }


@case("DiTTransformer2DModel", published={"num_layers": 1})
def dit() -> Built:
    config = {
        "num_attention_heads": 3,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 1,
        "sample_size": 8,
        "num_embeds_ada_norm": 10,
    }
    return config, {
        "hidden_states": noise(2, 4, 8, 8),
        "timestep": torch.tensor([1, 9]),
        "class_labels": torch.tensor([0, 4]),
    }


@case("HunyuanDiT2DModel", published={"in_channels": 4, "patch_size": 2, "num_layers": 2})
def hunyuan_dit() -> Built:
    config = {
        "num_attention_heads": 3,
        "attention_head_dim": 8,
        "hidden_size": 24,
        "in_channels": 4,
        "patch_size": 2,
        "sample_size": 8,
        "num_layers": 2,
        "cross_attention_dim": 10,
        "cross_attention_dim_t5": 16,  # its pooling has eight heads
        "pooled_projection_dim": 6,
        "text_len": 5,
        "text_len_t5": 6,
    }
    return config, hunyuan_dit_inputs()


def hunyuan_dit_inputs() -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, 8, 8),
        "timestep": times(3.0, 700.0),
        "encoder_hidden_states": noise(2, 5, 10),
        "text_embedding_mask": kept(5, 3, of=5, dtype=torch.float32),
        "encoder_hidden_states_t5": noise(2, 6, 16),
        "text_embedding_mask_t5": kept(6, 2, of=6, dtype=torch.float32),
        "image_meta_size": noise(2, 6),
        "style": torch.tensor([0, 0]),
        "image_rotary_emb": list(rotary(16, 8)),
    }


@case("LuminaNextDiT2DModel", published={"num_layers": 1, "num_kv_heads": 8})
def lumina_next() -> Built:
    config = {
        "sample_size": 8,
        "in_channels": 4,
        "hidden_size": 24,
        "num_layers": 1,
        "num_attention_heads": 3,
        "num_kv_heads": 1,
        "multiple_of": 8,
        "cross_attention_dim": 10,
        "learn_sigma": False,
    }
    angle = torch.outer(torch.arange(48 * 48).float() / 48, times(1.0, 0.5, 0.25, 0.125))
    return config, {
        "hidden_states": noise(2, 4, 8, 8),
        "timestep": times(0.2, 0.7),
        "encoder_hidden_states": noise(2, 6, 10),
        "encoder_mask": kept(6, 4, of=6, dtype=torch.long),
        "image_rotary_emb": torch.polar(torch.ones_like(angle), angle).reshape(48, 48, 4),
        "cross_attention_kwargs": {},
    }


@case("PriorTransformer", published={"num_layers": 1})
def prior() -> Built:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 6,
        "num_layers": 2,
        "embedding_dim": 10,
        "num_embeddings": 5,
        "additional_embeddings": 4,
    }
    return config, {
        "hidden_states": noise(2, 10),
        "timestep": torch.tensor([2, 5]),
        "proj_embedding": noise(2, 10),
        "encoder_hidden_states": noise(2, 5, 10),
        "attention_mask": kept(5, 3, of=5),
    }


@case("Transformer2DModel")
def transformer_2d() -> Built:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 16,
        "norm_num_groups": 4,
        "cross_attention_dim": 10,
        "attention_type": "default",
    }
    return config, {
        "hidden_states": noise(2, 16, 4, 4),
        "encoder_hidden_states": noise(2, 6, 10),
        "encoder_attention_mask": kept(6, 4, of=6),
    }


@case("ErnieImageTransformer2DModel", published={"num_layers": 1})
def ernie() -> Built:
    config = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_layers": 2,
        "ffn_hidden_size": 24,
        "in_channels": 8,
        "out_channels": 8,
        "text_in_dim": 12,
        "rope_axes_dim": (8, 4, 4),
    }
    return config, {
        "hidden_states": noise(2, 8, 4, 4),
        "timestep": times(0.2, 0.7),
        "text_bth": noise(2, 6, 12),
        "text_lens": torch.tensor([6, 3]),
    }


@case(
    "HiDreamImageTransformer2DModel",
    published={
        "patch_size": 2,
        "in_channels": 16,
        "caption_channels": [4096, 4096],
        "num_layers": 1,
        "num_single_layers": 1,
        "axes_dims_rope": (64, 32, 32),
        "llama_layers": [0],
    },
)
def hidream() -> Built:
    config = {
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "caption_channels": [12, 10],
        "text_emb_dim": 14,
        "num_routed_experts": 2,
        "num_activated_experts": 1,
        "axes_dims_rope": (4, 2, 2),
        "max_resolution": (8, 8),
        "llama_layers": [0, 1],
        "force_inference_output": True,
    }
    return config, {
        "hidden_states": noise(2, 4, 8, 8),
        "timesteps": torch.tensor([3, 700]),
        "encoder_hidden_states_t5": noise(2, 5, 12),
        "encoder_hidden_states_llama3": noise(2, 2, 5, 10),
        "pooled_embeds": noise(2, 14),
    }


@case("HunyuanImageTransformer2DModel", published={"num_layers": 1, "num_single_layers": 1, "text_embed_2_dim": 1472})
def hunyuan_image() -> Built:
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "text_embed_dim": 12,
        "text_embed_2_dim": 10,
        "rope_axes_dim": (4, 4),
    }
    return config, {
        "hidden_states": noise(2, 4, 4, 4),
        "timestep": times(3.0, 700.0),
        "encoder_hidden_states": noise(2, 6, 12),
        "encoder_attention_mask": kept(6, 4, of=6),
        "encoder_hidden_states_2": noise(2, 5, 10),
        "encoder_attention_mask_2": kept(5, 2, of=5),
    }


@case("Ideogram4Transformer2DModel", published={"num_layers": 1})
def ideogram() -> Built:
    config = {
        "in_channels": 12,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "adaln_dim": 10,
        "llm_features_dim": 14,
        "rope_theta": 1000,
        "mrope_section": (2, 1, 1),
    }
    return config, {
        "hidden_states": noise(2, 10, 12),
        "timestep": times(0.2, 0.7),
        "encoder_hidden_states": noise(2, 10, 14),
        "position_ids": torch.arange(10)[None, :, None].expand(2, 10, 3),
        "segment_ids": torch.tensor([[1] * 10, [1] * 6 + [2] * 4]),
        "indicator": torch.tensor([[3] * 4 + [2] * 6] * 2),
    }


JOY: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "in_channels": 6,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 10,
    "num_layers": 1,
    "rope_dim_list": [4, 6, 6],
}


@case("JoyImageEditTransformer3DModel", published={"num_layers": 1})
def joyimage() -> Built:
    return JOY, {
        "hidden_states": noise(2, 6, 2, 4, 4),
        "timestep": times(3.0, 700.0),
        "encoder_hidden_states": noise(2, 6, 10),
    }


@case("JoyImageEditPlusTransformer3DModel", published={"num_layers": 1})
def joyimage_plus() -> Built:
    return JOY, {
        "hidden_states": noise(1, 6, 6, 1, 2, 2),
        "timestep": times(3.0),
        "encoder_hidden_states": noise(1, 6, 10),
        "encoder_hidden_states_mask": kept(4, of=6),
        "shape_list": [[(1, 2, 2), (1, 1, 2)]],
    }


@case("Krea2Transformer2DModel", published={"num_layers": 1})
def krea() -> Built:
    config = {
        "in_channels": 12,
        "num_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "timestep_embed_dim": 8,
        "text_hidden_dim": 12,
        "num_text_layers": 2,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 1,
        "text_intermediate_size": 16,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": (4, 2, 2),
    }
    return config, {
        "hidden_states": noise(2, 9, 12),
        "encoder_hidden_states": noise(2, 5, 2, 12),
        "timestep": times(0.2, 0.7),
        "position_ids": torch.cat([text_ids(5), grid_ids(3, 3)]),
        "encoder_attention_mask": kept(5, 3, of=5),
    }


@case("NucleusMoEImageTransformer2DModel", published={"num_layers": 4, "capacity_factors": [8.0] * 4})
def nucleus() -> Built:
    config = {
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 3,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "joint_attention_dim": 10,
        "axes_dims_rope": (8, 4, 4),
        "moe_enabled": False,
        "capacity_factors": [8.0, 8.0],
    }
    return config, {
        "hidden_states": noise(2, 16, 12),
        "img_shapes": [(1, 4, 4)] * 2,
        "encoder_hidden_states": noise(2, 6, 10),
        "encoder_hidden_states_mask": kept(6, 4, of=6, dtype=torch.long),
        "timestep": times(0.2, 0.7),
    }


@case(
    "OmniGenTransformer2DModel",
    published={"num_layers": 1, "rope_scaling": {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}},
)
def omnigen() -> Built:
    config = {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 16,
        "num_layers": 2,
        "pad_token_id": 0,
        "vocab_size": 40,
        "in_channels": 4,
        "time_step_dim": 8,
        "rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
    }
    text, image = 7, 16
    total = text + 1 + image  # the time step is a token too
    return config, {
        "hidden_states": noise(1, 4, 8, 8),
        "timestep": times(0.4),
        "input_ids": torch.arange(1, text + 1)[None],
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": torch.ones(1, total, total).tril(text),
        "position_ids": torch.arange(total)[None],
    }


@case("PRXTransformer2DModel", published={"depth": 1})
def prx() -> Built:
    config = {
        "in_channels": 4,
        "context_in_dim": 10,
        "hidden_size": 32,
        "mlp_ratio": 2.0,
        "num_heads": 2,
        "depth": 2,
        "axes_dim": [8, 8],
    }
    return config, {
        "hidden_states": noise(2, 4, 8, 8),
        "timestep": times(0.2, 0.7),
        "encoder_hidden_states": noise(2, 6, 10),
        "attention_mask": kept(6, 3, of=6),
    }


@case("BriaFibo2Transformer2DModel", published={"n_layers": 7, "n_refiner_layers": 1})
def bria_fibo2() -> Built:
    config = {
        "in_channels": 4,
        "patch_size": 2,
        "dim": 24,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "cap_feat_dim": 10,
        "injection_layer_ids": (1,),
        "perceiver_num_layers": 1,
        "min_num_gist_tokens": 2,
        "max_num_gist_tokens": 4,
        "gist_step": 1,
        "gist_min_text_len": 2,
        "gist_max_text_len": 16,
        "axes_dims": (4, 4, 4),
        "axes_lens": (16, 16, 16),
    }
    return config, {
        "hidden_states": noise(2, 4, 8, 8),
        "timestep": times(0.2, 0.7),
        "encoder_hidden_states": noise(2, 2, 6, 10),
        "encoder_attention_mask": kept(6, 4, of=6),
        "context_latents": [noise(2, 4, 4, 4)],
    }


@case("QwenImage21Transformer2DModel", published={"num_layers": 1})
def qwen_image_21() -> Built:
    """Text and one condition image before the target image: the prefill calls attention without naming a backend."""
    config = {
        "in_channels": 6,
        "out_channels": 6,
        "num_layers": 2,
        "attention_head_dim": 12,
        "num_attention_heads": 2,
        "context_in_dim": 10,
        "axes_dims_rope": (4, 4, 4),
    }
    slots = torch.tensor([[False, False, True, False, False, True]])
    return config, {
        "hidden_states": noise(1, 8, 6),
        "encoder_hidden_states": noise(1, 5, 10),
        "timestep": times(0.7),
        "img_shapes": [[(1, 2, 2), (1, 2, 2)]],
        "img_mask": slots,
    }
