"""Autoencoders."""

from __future__ import annotations

from typing import Any

import diffusers
import diffusers_models as tiny
import torch

from sweep_models import Built, case, noise

#: Stable Diffusion's, FLUX' and most others' encoder: 512 channels, one head.
KL: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
}
WAN_TI2V = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
case("AutoencoderKL", published=KL)(tiny.vae_kl)
case("AutoencoderKLWan", published={})(tiny.vae_wan)
case("AutoencoderKLQwenImage", published={})(tiny.vae_qwen_image)
case("AutoencoderKLCosmos", published={})(tiny.vae_cosmos)
case("AutoencoderKLHunyuanVideo", published={})(tiny.vae_hunyuan_video)

#: Two levels of the plain kind.
TWO: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}


@case("AutoencoderKLWan", variant="2.2 TI2V", published=WAN_TI2V)
def wan_22() -> Built:
    config = {
        "base_dim": 8,
        "decoder_base_dim": 12,
        "z_dim": 4,
        "dim_mult": [1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False],
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
    }
    return config, {"sample": noise(1, 3, 1, 16, 16)}


@case("AutoencoderKLFlux2", published={})
def flux2() -> Built:
    return {**TWO, "latent_channels": 4}, {"sample": noise(1, 3, 16, 16)}


@case(
    "AsymmetricAutoencoderKL",
    published={
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "down_block_out_channels": (128, 256, 512, 512),
        "up_block_out_channels": (192, 384, 768, 768),
        "layers_per_down_block": 2,
        "layers_per_up_block": 3,
    },
)
def asymmetric() -> Built:
    config = {
        "down_block_types": TWO["down_block_types"],
        "up_block_types": TWO["up_block_types"],
        "down_block_out_channels": (8, 16),
        "up_block_out_channels": (8, 16),
        "norm_num_groups": 4,
    }
    return config, {"sample": noise(1, 3, 16, 16), "mask": torch.ones(1, 1, 16, 16)}


@case(
    "AutoencoderKLTemporalDecoder",
    published={
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
    },
)
def svd() -> Built:
    config = {"block_out_channels": (32, 32), "down_block_types": TWO["down_block_types"], "layers_per_block": 1}
    return config, {"sample": noise(2, 3, 8, 8), "num_frames": 2}


@case("VQModel", published={**KL, "block_out_channels": (128, 256, 256, 512), "norm_type": "spatial"})
def vq() -> Built:
    return {**TWO, "num_vq_embeddings": 12}, {"sample": noise(1, 3, 16, 16)}


@case("ConsistencyDecoderVAE", published={})
def consistency() -> Built:
    config = {
        "encoder_block_out_channels": (8, 16),
        "encoder_down_block_types": TWO["down_block_types"],
        "encoder_layers_per_block": 1,
        "encoder_norm_num_groups": 4,
        "decoder_block_out_channels": (8, 16),
        "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2,
        "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2,
        "decoder_layers_per_block": 1,
        "decoder_norm_num_groups": 4,
    }
    return config, {"sample": noise(1, 3, 16, 16)}


@case("AutoencoderKLAllegro", published={})
def allegro() -> Built:
    """Tiles always: its `forward` encodes and decodes in windows of this size."""
    model = diffusers.AutoencoderKLAllegro(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4, sample_size=32
    )
    model.enable_tiling()
    model.kernel, model.stride = (8, 32, 32), (4, 16, 16)
    return model, {"sample": noise(1, 3, 8, 32, 32)}


@case("AutoencoderKLMochi", published={})
def mochi() -> Built:
    config = {
        "latent_channels": 4,
        "encoder_block_out_channels": (32, 32, 32, 32),
        "decoder_block_out_channels": (32, 32, 32, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
        "latents_mean": (0.0,) * 4,
        "latents_std": (1.0,) * 4,
    }
    return config, {"sample": noise(1, 3, 7, 16, 16)}


HUNYUAN: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (32, 32),
    "layers_per_block": 1,
    "spatial_compression_ratio": 2,
}


@case("AutoencoderKLHunyuanVideo15", published={})
def hunyuan_15() -> Built:
    return {**HUNYUAN, "temporal_compression_ratio": 1}, {"sample": noise(1, 3, 3, 8, 8)}


@case("AutoencoderKLHunyuanImageRefiner", published={})
def hunyuan_refiner() -> Built:
    return {**HUNYUAN, "temporal_compression_ratio": 1}, {"sample": noise(1, 3, 3, 8, 8)}


@case(
    "AutoencoderKLHunyuanImage",
    published={
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 64,
        "block_out_channels": (128, 256, 512, 512, 1024, 1024),
        "layers_per_block": 2,
        "spatial_compression_ratio": 32,
        "sample_size": 384,
    },
)
def hunyuan_image() -> Built:
    return {**HUNYUAN, "sample_size": 16}, {"sample": noise(1, 3, 8, 8)}


@case("AutoencoderKLQwenImage21", published={})
def qwen_image_21() -> Built:
    config = {
        "base_dim": 8,
        "decoder_base_dim": 12,
        "z_dim": 4,
        "dim_mult": [1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False],
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    }
    return config, {"sample": noise(1, 4, 1, 16, 16)}


@case("AutoencoderVidTok", published={}, head_dims=(512,))
def vidtok() -> Built:
    config = {"ch": 32, "ch_mult": [1, 1], "z_channels": 4, "num_res_blocks": 1, "is_causal": False}
    return config, {"sample": noise(1, 3, 4, 16, 16), "sample_posterior": False}


@case("AutoencoderKLMiniMaxH3", published={})
def minimax_h3() -> Built:
    config = {
        "latent_channels": 4,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "spatial_downsample_factors": (2, 2),
        "temporal_downsample_factors": (2, 2),
        "norm_num_groups": 4,
        "decoder_num_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_attention_head_dim": 8,
        "decoder_num_register_tokens": 2,
        "decoder_ffn_mult": 1,
        "latents_mean": (0.0,) * 4,
        "latents_std": (1.0,) * 4,
    }
    return config, {"sample": noise(1, 3, 22, 8, 8)}


@case("AutoencoderKLMiniMaxH3Audio", published={})
def minimax_h3_audio() -> Built:
    config = {
        "encoder_dim": 4,
        "encoder_rates": (2, 2),
        "latent_dim": 16,
        "latent_channels": 4,
        "num_attention_heads": 2,
        "decoder_dim": 8,
        "decoder_rates": (2, 2),
        "decoder_kernel_sizes": (4, 4),
        "resblock_kernel_sizes": (3,),
        "resblock_dilation_sizes": ((1,),),
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    }
    return config, {"sample": noise(1, 1, 48)}


@case("AutoencoderKLKVAEAudio", published={}, gain=2.0)
def kvae_audio() -> Built:
    config = {
        "encoder_dim": 4,
        "encoder_rates": [2, 2],
        "latent_dim": 16,
        "codebook_dim": 4,
        "decoder_dim": 16,
        "decoder_rates": [2, 2],
        "attn_num_heads": 2,
    }
    return config, {"sample": noise(1, 1, 48)}


@case("AutoencoderKLLTX2Audio", variant="with attention", published={"mid_block_add_attention": True}, head_dims=(512,))
def ltx2_audio() -> Built:
    """Off in every release; the attention it can have is written out."""
    config = {
        "base_channels": 8,
        "ch_mult": (1, 1),
        "num_res_blocks": 1,
        "resolution": 16,
        "latent_channels": 4,
        "mid_block_add_attention": True,
        "mel_bins": 16,
    }
    return config, {"sample": noise(1, 2, 16, 16)}


@case("AutoencoderSAME", published={}, head_dims=(64,))
def same() -> Built:
    config = {
        "patch_size": 4,
        "encoder_channels": 8,
        "encoder_c_mults": (2,),
        "encoder_strides": (2,),
        "encoder_transformer_depths": (1,),
        "latent_dim": 6,
        "dim_heads": 8,
        "ff_mult": 1,
    }
    return config, {"sample": noise(1, 2, 64)}


@case("MMAudioVAE", published={})
def mmaudio() -> Built:
    """Its processor names torch's own backend on every call, whatever is chosen."""
    config = {
        "mel_bins": 16,
        "latent_channels": 4,
        "hidden_channels": 16,
        "channel_multipliers": (1, 2),
        "layers_per_block": 1,
        "n_fft": 64,
        "hop_length": 16,
    }
    return config, {"sample": noise(1, 384)}


@case("AutoencoderRAE", published={})
def rae() -> Built:
    config = {
        "encoder_hidden_size": 64,
        "encoder_patch_size": 4,
        "encoder_num_hidden_layers": 1,
        "encoder_input_size": 16,
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 20,
        "patch_size": 4,
        "image_size": 16,
    }
    return config, {"sample": torch.rand(1, 3, 16, 16)}


@case(
    "AutoencoderDC",
    published={
        "attention_head_dim": 32,
        "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
        "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    },
)
def dc() -> Built:
    """Linear attention only: nothing for us to do, and the report must say so."""
    config = {
        "attention_head_dim": 4,
        "latent_channels": 4,
        "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), (5,)),
        "decoder_qkv_multiscales": ((), (5,)),
    }
    return config, {"sample": noise(1, 3, 16, 16)}


@case("LTX2VideoDiffusionDecoderModel", published={}, slow=True, flex=True)
def ltx2_decoder() -> Built:
    """Neighbourhood attention by flex: stays as it is."""
    config = {
        "latent_channels": 4,
        "patch_size": 2,
        "decoder_head_dim": 16,
        "decoder_stage_channels": (64, 32, 16, 16, 16),
        "decoder_stage_depths": (1, 1, 1, 1, 1),
        "decoder_stage_kernels": ((3, 3, 3),) * 4,
        "decoder_upsample_channel_reductions": (2, 2, 1, 1),
        "decoder_stage5_kernel": (3, 3, 3),
        "decoder_t_emb_dim": 16,
        "spatial_compression_ratio": 16,
    }
    return config, {"z": noise(1, 4, 2, 3, 3)}
