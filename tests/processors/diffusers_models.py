"""Tiny random fp32 models of diffusers with inputs, and counters of what their attention calls became.

Shared by the tests of the processor and of enable/disable; knows nothing of ffpa_hf but its door `attend`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ffpa_hf.processors import redirect


def flux(**more: Any) -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
        **more,
    )
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([1.0, 0.5]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(8, 3),
    }
    return model, inputs


def flux2() -> tuple[Any, dict[str, Any]]:
    model = diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=16,
        axes_dims_rope=[4, 4, 4, 4],
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.randn(16, 4),
        "txt_ids": torch.randn(8, 4),
        "guidance": torch.tensor([1.0]),
    }
    return model, inputs


def chroma() -> tuple[Any, dict[str, Any]]:
    model = diffusers.ChromaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[4, 4, 8],
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[1, 5:8] = False  # an N x N mask whose padded rows see no key
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "timestep": torch.tensor([1.0, 0.5]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(8, 3),
        "attention_mask": mask,
    }
    return model, inputs


def sd3() -> tuple[Any, dict[str, Any]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 64),
        "timestep": torch.tensor([10, 20]),
    }
    return model, inputs


def qwen_image() -> tuple[Any, dict[str, Any]]:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    inputs = {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([1.0, 0.5]),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }
    return model, inputs


def wan() -> tuple[Any, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(1, 6, 16),
        "timestep": torch.tensor([7]),
    }
    return model, inputs


def cogvideox() -> tuple[Any, dict[str, Any]]:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=8,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        patch_size=2,
        patch_size_t=None,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
    )
    inputs = {
        "hidden_states": torch.randn(2, 1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 8, 8),
        "timestep": torch.tensor([3, 4]),
    }
    return model, inputs


def hunyuan_video() -> tuple[Any, dict[str, Any]]:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    inputs = {
        "hidden_states": torch.randn(2, 4, 1, 6, 6),
        "timestep": torch.tensor([3, 4]),
        "encoder_hidden_states": torch.randn(2, 9, 16),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(2, 8),
        "guidance": torch.tensor([6.0, 6.0]),
    }
    return model, inputs


def ltx() -> tuple[Any, dict[str, Any]]:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=1,
        qk_norm="rms_norm_across_heads",
        caption_channels=16,
    )
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 5:] = False
    inputs = {
        "hidden_states": torch.randn(2, 2 * 4 * 4, 8),
        "encoder_hidden_states": torch.randn(2, 9, 16),
        "timestep": torch.tensor([3, 4]),
        "encoder_attention_mask": mask,
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }
    return model, inputs


def pixart() -> tuple[Any, dict[str, Any]]:
    model = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=8,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        use_additional_conditions=False,
    )
    mask = torch.ones(2, 8)
    mask[1, 3:] = 0
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "encoder_attention_mask": mask,
        "timestep": torch.tensor([3, 4]),
        "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
    }
    return model, inputs


def z_image() -> tuple[Any, dict[str, Any]]:
    model = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    for name, parameter in model.named_parameters():
        if "pad_token" in name:  # left uninitialised by its constructor
            torch.nn.init.normal_(parameter)
    inputs = {
        "x": [torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)],
        "t": torch.tensor([0.3, 0.4]),
        "cap_feats": [torch.randn(5, 16), torch.randn(9, 16)],
    }
    return model, inputs


def mochi() -> tuple[Any, dict[str, Any]]:
    model = diffusers.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        qk_norm="rms_norm",
        text_embed_dim=16,
        time_embed_dim=4,
        activation_fn="swiglu",
        max_sequence_length=16,
    )
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(2, 8, 16),
        "timestep": torch.tensor([3, 4]),
        "encoder_attention_mask": mask,
    }
    return model, inputs


def lumina2() -> tuple[Any, dict[str, Any]]:
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        ffn_dim_multiplier=None,
        norm_eps=1e-5,
        scaling_factor=1.0,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(128, 128, 128),
        cap_feat_dim=16,
    )
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 8, 16),
        "timestep": torch.tensor([0.3, 0.4]),
        "encoder_attention_mask": mask,
    }
    return model, inputs


def sana() -> tuple[Any, dict[str, Any]]:
    model = diffusers.SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=8,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 6, 8),
        "timestep": torch.tensor([3, 4]),
    }
    return model, inputs


def cosmos() -> tuple[Any, dict[str, Any]]:
    model = diffusers.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=False,
        extra_pos_embed_type="learnable",
    )
    mask = torch.ones(1, 6, dtype=torch.bool)
    mask[0, 4:] = False
    inputs = {
        "hidden_states": torch.randn(1, 4, 1, 8, 8),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(1, 6, 16),
        "attention_mask": mask,
    }
    return model, inputs


def unet_sdxl(**more: Any) -> tuple[Any, dict[str, Any]]:
    settings = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "transformer_layers_per_block": (1, 2),
        "projection_class_embeddings_input_dim": 80,
        "cross_attention_dim": 64,
        "norm_num_groups": 8,
    }
    model = diffusers.UNet2DConditionModel(**{**settings, **more})
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": torch.randn(2, 7, 64),
        "encoder_attention_mask": mask,
        "added_cond_kwargs": {"text_embeds": torch.randn(2, 32), "time_ids": torch.randn(2, 6)},
    }
    return model, inputs


def unet_gligen() -> tuple[Any, dict[str, Any]]:
    """A UNet whose blocks call a second attention with boxes, through cross_attention_kwargs."""
    model, inputs = unet_sdxl(attention_type="gated")
    boxes = {
        "boxes": torch.rand(2, 3, 4),
        "positive_embeddings": torch.randn(2, 3, 64),
        "masks": torch.ones(2, 3),
    }
    return model, {**inputs, "cross_attention_kwargs": {"gligen": boxes}}


def unet_added_kv() -> tuple[Any, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        attention_head_dim=8,
        cross_attention_dim=16,
        encoder_hid_dim=16,
        norm_num_groups=8,
        upcast_attention=True,
    )
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "encoder_attention_mask": mask,
    }
    return model, inputs


def unet_2d() -> tuple[Any, dict[str, Any]]:
    model = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(16, 32),
        layers_per_block=1,
        attention_head_dim=None,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    return model, {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor(3)}


def controlnet_flux() -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxControlNetModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    for parameter in model.parameters():  # the output projections start at zero
        torch.nn.init.normal_(parameter, std=0.1)
    _, inputs = flux()
    return model, {**inputs, "controlnet_cond": torch.randn(2, 16, 4)}


def vae_kl() -> tuple[Any, dict[str, Any]]:
    model = diffusers.AutoencoderKL(
        block_out_channels=[16, 32],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        norm_num_groups=8,
    )
    return model, {"sample": torch.randn(1, 3, 16, 16)}


def vae_wan() -> tuple[Any, dict[str, Any]]:
    model = diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return model, {"sample": torch.randn(1, 3, 1, 16, 16)}


def vae_qwen_image() -> tuple[Any, dict[str, Any]]:
    model = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return model, {"sample": torch.randn(1, 3, 1, 16, 16)}


def vae_cosmos() -> tuple[Any, dict[str, Any]]:
    model = diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        patch_size=4,
        patch_type="haar",
        scaling_factor=1.0,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    return model, {"sample": torch.randn(1, 3, 9, 32, 32)}


def vae_hunyuan_video() -> tuple[Any, dict[str, Any]]:
    model = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=1,  # groups of two channels would blow rounding up to 1e-5 of the result
    )
    return model, {"sample": torch.randn(1, 3, 5, 16, 16)}


#: What the foundation promises, then what else the generic way reaches.
PROMISED: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "flux": flux,
    "sd3": sd3,
    "qwen_image": qwen_image,
    "wan": wan,
    "cogvideox": cogvideox,
    "unet_sdxl": unet_sdxl,
    "vae_kl": vae_kl,
}
MORE: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "flux2": flux2,
    "chroma": chroma,
    "hunyuan_video": hunyuan_video,
    "ltx": ltx,
    "pixart": pixart,
    "z_image": z_image,
    "mochi": mochi,
    "lumina2": lumina2,
    "sana": sana,
    "cosmos": cosmos,
    "unet_gligen": unet_gligen,
    "unet_added_kv": unet_added_kv,
    "unet_2d": unet_2d,
    "controlnet_flux": controlnet_flux,
    "vae_hunyuan_video": vae_hunyuan_video,
}
#: Attention written inside `forward`, reached by `enable` alone; Cosmos' has a processor but no setter.
INLINE: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "vae_wan": vae_wan,
    "vae_qwen_image": vae_qwen_image,
    "vae_cosmos": vae_cosmos,
}
EVERY = {**PROMISED, **MORE, **INLINE}


def make(name: str) -> tuple[Any, dict[str, Any]]:
    """The model in eval mode, with weights large enough that attention matters, and its inputs."""
    torch.manual_seed(0)
    model, inputs = EVERY[name]()
    return model.eval(), inputs


def run(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Every tensor that the model returns, as one flat vector."""
    torch.manual_seed(1)
    flat: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            flat.append(value.flatten())
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)
        elif hasattr(value, "latent_dist"):
            collect(value.latent_dist.mode())

    collect(model(**inputs, return_dict=False))
    return torch.cat(flat)


class AttentionOps(TorchDispatchMode):
    """Counts attention computations at the lowest level: fused attention ops, and softmax where it is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if ("scaled_dot_product" in name or "softmax" in name) and "backward" not in name:
            self.count += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted(monkeypatch: Any) -> Iterator[list[dict[str, Any]]]:
    """Every call that reaches `attend`: its shapes, mask, route and site."""
    calls: list[dict[str, Any]] = []
    attend = redirect.attend

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **keywords: Any) -> Any:
        calls.append({"query": query, "key": key, "value": value, **keywords})
        return attend(query, key, value, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(redirect, "attend", spy)
        yield calls
