"""UNets, and the transformers that live inside them."""

from __future__ import annotations

from typing import Any

import diffusers
import diffusers_models as tiny
import torch
from diffusers.models.attention_processor import Attention

from sweep_models import Built, case, kept, noise, times

SD15 = {"attention_head_dim": 8, "cross_attention_dim": 768}
SDXL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
}
case("UNet2DConditionModel", variant="SDXL", published=SDXL)(tiny.unet_sdxl)
case("UNet2DConditionModel", variant="GLIGEN")(tiny.unet_gligen)
case("UNet2DConditionModel", variant="added KV")(tiny.unet_added_kv)
case(
    "UNet2DModel",
    published={
        "sample_size": 256,
        "block_out_channels": (128, 128, 256, 256, 512, 512),
        "down_block_types": ("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
        "attention_head_dim": None,
    },
)(tiny.unet_2d)

#: What UNets with two levels share.
LEVELS: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 10,
}


@case("UNet2DConditionModel", published=SD15)
def unet_2d_condition() -> Built:
    config = {
        **LEVELS,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "attention_head_dim": 2,
        "sample_size": 8,
    }
    return config, {"sample": noise(2, 4, 8, 8), "timestep": torch.tensor(3), "encoder_hidden_states": noise(2, 6, 10)}


def inputs_3d(frames: int = 3) -> dict[str, Any]:
    return {
        "sample": noise(1, 4, frames, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": noise(1, 6, 10),
    }


@case("UNet3DConditionModel", published={})
def unet_3d() -> Built:
    config = {
        **LEVELS,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        "attention_head_dim": 4,
        "sample_size": 8,
    }
    return config, inputs_3d()


@case("I2VGenXLUNet", published={})
def i2vgen() -> Built:
    config = {
        **LEVELS,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        "attention_head_dim": 4,
        "num_attention_heads": None,
        "sample_size": 8,
    }
    return config, {
        **inputs_3d(),
        "fps": torch.tensor([8]),
        "image_latents": noise(1, 4, 3, 8, 8),
        "image_embeddings": noise(1, 10),
    }


@case("UNetMotionModel", published={})
def unet_motion() -> Built:
    config = {
        **LEVELS,
        "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        "num_attention_heads": 2,
        "motion_num_attention_heads": 2,
        "sample_size": 8,
    }
    return config, {**inputs_3d(), "encoder_hidden_states": noise(3, 6, 10)}


@case("UNetSpatioTemporalConditionModel", published={})
def svd() -> Built:
    config = {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        "num_attention_heads": 2,
        "cross_attention_dim": 10,
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 12,
        "sample_size": 8,
    }
    return config, {
        "sample": noise(1, 2, 8, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": noise(1, 1, 10),
        "added_time_ids": noise(1, 3),
    }


@case("Kandinsky3UNet", published={})
def kandinsky3() -> Built:
    config = {
        "time_embedding_dim": 16,
        "groups": 4,
        "attention_head_dim": 8,
        "layers_per_block": 2,
        "block_out_channels": (8, 16, 32, 64),
        "cross_attention_dim": 16,
        "encoder_hid_dim": 10,
    }
    return config, {
        "sample": noise(2, 4, 16, 16),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": noise(2, 6, 10),
        "encoder_attention_mask": kept(6, 4, of=6),
    }


@case("DreamLiteUNetModel", published={})
def dreamlite() -> Built:
    config = {
        **LEVELS,
        "down_block_types": ("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
        "up_block_types": ("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
        "attention_head_dim": 2,
        "sample_size": 8,
    }
    return config, {
        "sample": noise(2, 4, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": noise(2, 6, 10),
    }


@case("StableCascadeUNet", published={})
def cascade() -> Built:
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "timestep_ratio_embedding_dim": 8,
        "conditioning_dim": 16,
        "block_out_channels": (16, 16),
        "num_attention_heads": (2, 2),
        "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1),
        "clip_text_in_channels": 10,
        "clip_text_pooled_in_channels": 10,
        "clip_image_in_channels": 6,
        "clip_seq": 2,
        "dropout": (0.0, 0.0),
    }
    return config, {
        "sample": noise(2, 4, 8, 8),
        "timestep_ratio": times(0.9, 0.4),
        "clip_text_pooled": noise(2, 1, 10),
        "clip_text": noise(2, 5, 10),
        "clip_img": noise(2, 1, 6),
    }


@case("UVit2DModel", published={})
def uvit() -> Built:
    config = {
        "hidden_size": 16,
        "cond_embed_dim": 6,
        "micro_cond_encode_dim": 2,
        "micro_cond_embed_dim": 10,
        "encoder_hidden_size": 8,
        "vocab_size": 20,
        "codebook_size": 12,
        "in_channels": 16,
        "block_out_channels": 16,
        "num_res_blocks": 1,
        "block_num_heads": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 20,
        "sample_size": 4,
    }
    return config, {
        "input_ids": torch.arange(16).reshape(1, 4, 4),
        "encoder_hidden_states": noise(1, 6, 8),
        "pooled_text_emb": noise(1, 6),
        "micro_conds": noise(1, 5),
    }


@case("AudioLDM2UNet2DConditionModel", where="diffusers.pipelines.audioldm2.modeling_audioldm2", published={})
def audioldm2() -> Built:
    config = {
        **LEVELS,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": (10, 10),
        "attention_head_dim": 2,
        "sample_size": 8,
    }
    return config, {
        "sample": noise(2, 4, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": noise(2, 6, 10),
        "encoder_attention_mask": kept(6, 4, of=6),
        "encoder_hidden_states_1": noise(2, 5, 10),
        "encoder_attention_mask_1": kept(5, 2, of=5),
    }


@case("TransformerTemporalModel")
def temporal() -> Built:
    config = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 8, "norm_num_groups": 4}
    return config, {"hidden_states": noise(6, 8, 4, 4), "num_frames": 3}


@case("UniDiffuserModel", head_dims=(64,))
def unidiffuser() -> Built:
    config = {
        "text_dim": 8,
        "clip_img_dim": 6,
        "num_text_tokens": 5,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "norm_num_groups": 4,
        "sample_size": 8,
        "patch_size": 2,
        "activation_fn": "gelu",
        "num_embeds_ada_norm": 10,
        "use_timestep_embedding": True,
        "ff_final_dropout": False,
    }
    return config, {
        "latent_image_embeds": noise(2, 4, 8, 8),
        "image_embeds": noise(2, 1, 6),
        "prompt_embeds": noise(2, 5, 8),
        "timestep_img": torch.tensor([3, 7]),
        "timestep_text": torch.tensor([2, 5]),
    }


@case(
    "UNetFlatConditionModel",
    where="diffusers.pipelines.deprecated.versatile_diffusion.modeling_text_unet",
    published={},
)
def unet_flat() -> Built:
    config = {
        **LEVELS,
        "down_block_types": ("DownBlockFlat", "CrossAttnDownBlockFlat"),
        "up_block_types": ("CrossAttnUpBlockFlat", "UpBlockFlat"),
        "attention_head_dim": 2,
        "sample_size": 8,
    }
    return config, {
        "sample": noise(2, 4, 4, 1),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": noise(2, 6, 10),
    }


@case("WuerstchenPrior", where="diffusers.pipelines.deprecated.wuerstchen.modeling_wuerstchen_prior", published={})
def wuerstchen_prior() -> Built:
    config = {"c_in": 4, "c": 16, "c_cond": 10, "c_r": 8, "depth": 1, "nhead": 2, "dropout": 0.0}
    return config, {"x": noise(2, 4, 4, 4), "r": times(0.9, 0.4), "c": noise(2, 5, 10)}


@case(
    "WuerstchenDiffNeXt",
    where="diffusers.pipelines.deprecated.wuerstchen.modeling_wuerstchen_diffnext",
    published={"blocks": [1, 1, 1, 1]},
)
def wuerstchen() -> Built:
    config = {
        "c_r": 8,
        "c_cond": 12,
        "c_hidden": [16, 16],
        "nhead": [-1, 2],
        "blocks": [1, 1],
        "level_config": ["CT", "CTA"],
        "inject_effnet": [False, True],
        "effnet_embd": 4,
        "clip_embd": 10,
        "dropout": 0.0,
    }
    return config, {
        "x": noise(2, 4, 8, 8),
        "r": times(0.9, 0.4),
        "effnet": noise(2, 4, 2, 2),
        "clip": noise(2, 5, 10),
    }


@case("DreamLiteTransformer2DModel")
def dreamlite_2d() -> Built:
    """One key/value head for all; its own processor is set by the UNet that owns it."""
    from diffusers.models.unets.unet_dreamlite import DreamLiteAttnProcessor2_0

    model = diffusers.DreamLiteTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=16,
        norm_num_groups=4,
        cross_attention_dim=10,
        qk_norm="rms_norm",
        num_kv_heads=1,
    )
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(DreamLiteAttnProcessor2_0())
    return model, {
        "hidden_states": noise(2, 16, 4, 4),
        "encoder_hidden_states": noise(2, 6, 10),
        "encoder_attention_mask": kept(6, 4, of=6),
    }
