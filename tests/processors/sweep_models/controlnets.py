"""ControlNets."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import diffusers
import diffusers_models as tiny
import torch
import torch.nn.functional as F
from torch import Tensor

from sweep_models import Built, case, kept, noise, times
from sweep_models.image import hunyuan_dit, hunyuan_dit_inputs
from sweep_models.unets import LEVELS

case("FluxControlNetModel", published={})(tiny.controlnet_flux)

SPATIAL: dict[str, Any] = {
    **LEVELS,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "attention_head_dim": 2,
    "conditioning_embedding_out_channels": (4, 8),
}


def spatial_inputs() -> dict[str, Any]:
    return {
        "sample": noise(2, 4, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": noise(2, 6, 10),
        "controlnet_cond": noise(2, 3, 16, 16),
    }


@case("ControlNetModel", published={})
def controlnet() -> Built:
    return SPATIAL, spatial_inputs()


@case("ControlNetUnionModel", published={"addition_time_embed_dim": 256})
def controlnet_union() -> Built:
    config = {
        **SPATIAL,
        "addition_time_embed_dim": 4,
        "num_trans_channel": 8,
        "num_trans_head": 2,
        "num_proj_channel": 8,
    }
    inputs = spatial_inputs()
    return config, {
        **inputs,
        "controlnet_cond": [inputs["controlnet_cond"]],
        "control_type": torch.tensor([[0, 1, 0, 0, 0, 0]] * 2),
        "control_type_idx": [1],
    }


@case("SparseControlNetModel", published={})
def sparse_controlnet() -> Built:
    config = {
        **SPATIAL,
        "down_block_types": ("DownBlockMotion", "CrossAttnDownBlockMotion"),
        "conditioning_channels": 4,
        "motion_num_attention_heads": 2,
    }
    return config, {
        "sample": noise(1, 4, 3, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": noise(3, 6, 10),
        "controlnet_cond": noise(1, 4, 3, 8, 8),
        "conditioning_mask": torch.ones(1, 1, 3, 8, 8),
    }


@case("UNetControlNetXSModel", published={"num_attention_heads": 8})
def controlnet_xs() -> Built:
    config = {
        "sample_size": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (8, 16),
        "norm_num_groups": 4,
        "cross_attention_dim": 10,
        "num_attention_heads": 2,
        "ctrl_conditioning_embedding_out_channels": (4, 4),
        "ctrl_block_out_channels": (4, 8),
        "ctrl_num_attention_heads": 2,
        "ctrl_max_norm_num_groups": 4,
    }
    return config, spatial_inputs()


@case("SD3ControlNetModel", published={"num_layers": 1})
def sd3_controlnet() -> Built:
    config = {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 10,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 12,
        "out_channels": 4,
        "pos_embed_max_size": 8,
    }
    return config, {
        "hidden_states": noise(2, 4, 8, 8),
        "controlnet_cond": noise(2, 4, 8, 8),
        "encoder_hidden_states": noise(2, 6, 10),
        "pooled_projections": noise(2, 12),
        "timestep": torch.tensor([3, 700]),
    }


@case("QwenImageControlNetModel", published={"num_layers": 1})
def qwen_controlnet() -> Built:
    config = {
        "in_channels": 12,
        "out_channels": 3,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 10,
        "axes_dims_rope": (8, 4, 4),
    }
    return config, {
        "hidden_states": noise(2, 16, 12),
        "controlnet_cond": noise(2, 16, 12),
        "encoder_hidden_states": noise(2, 6, 10),
        "encoder_hidden_states_mask": kept(6, 4, of=6, dtype=torch.long),
        "timestep": times(0.9, 0.4),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }


@case("SanaControlNetModel", published={"num_layers": 1})
def sana_controlnet() -> Built:
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 1,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": 10,
        "sample_size": 8,
    }
    return config, {
        "hidden_states": noise(2, 4, 8, 8),
        "encoder_hidden_states": noise(2, 6, 10),
        "timestep": torch.tensor([3, 700]),
        "controlnet_cond": noise(2, 4, 8, 8),
        "encoder_attention_mask": kept(6, 4, of=6),
    }


@case("HunyuanDiT2DControlNetModel", published={"in_channels": 4, "patch_size": 2, "transformer_num_layers": 4})
def hunyuan_dit_controlnet() -> Built:
    config, _ = hunyuan_dit()
    del config["num_layers"]
    config["transformer_num_layers"] = 4
    inputs = hunyuan_dit_inputs()
    del inputs["hidden_states"]
    return config, {"hidden_states": noise(2, 4, 8, 8), "controlnet_cond": noise(2, 4, 8, 8), **inputs}


@case("CosmosControlNetModel", published={})
def cosmos_controlnet() -> Built:
    assert diffusers.CosmosControlNetModel is not None
    module: Any = sys.modules["diffusers.models.controlnets.controlnet_cosmos"]
    if not hasattr(module, "transforms"):  # torchvision, wanted for one nearest-neighbour resize

        def resize(image: Tensor, size: list[int], interpolation: str) -> Tensor:
            return F.interpolate(image, size, mode=interpolation)

        module.transforms = SimpleNamespace(
            functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
        )
    config = {
        "n_controlnet_blocks": 1,
        "in_channels": 6,
        "latent_channels": 6,
        "model_channels": 24,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "mlp_ratio": 2,
        "text_embed_dim": 24,
        "adaln_lora_dim": 4,
        "patch_size": (1, 2, 2),
        "max_size": (4, 16, 16),
        "rope_scale": (2.0, 1.0, 1.0),
        "extra_pos_embed_type": None,
        "img_context_dim_in": 24,
        "img_context_dim_out": 24,
        "use_crossattn_projection": False,
    }
    return config, {
        "controls_latents": noise(1, 4, 1, 8, 8),
        "latents": noise(1, 4, 1, 8, 8),
        "timestep": times(0.5),
        "encoder_hidden_states": (noise(1, 6, 24), noise(1, 3, 24)),
        "condition_mask": torch.ones(1, 1, 1, 8, 8),
        "padding_mask": torch.zeros(1, 1, 8, 8),
    }


@case(
    "ZImageControlNetModel",
    published={"control_layers_places": [0], "control_refiner_layers_places": [0], "control_in_dim": 16},
)
def z_image_controlnet() -> Built:
    """Borrows the embedders and refiners of the transformer it steers."""
    transformer, inputs = tiny.z_image()
    model = diffusers.ZImageControlNetModel(
        control_layers_places=[0],
        control_refiner_layers_places=[0],
        control_in_dim=4,
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
    )
    model = diffusers.ZImageControlNetModel.from_transformer(model, transformer)
    return model, {**inputs, "control_context": [noise(4, 1, 8, 8), noise(4, 1, 8, 8)]}
