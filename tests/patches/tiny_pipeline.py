"""A tiny random Stable Diffusion pipeline. Knows nothing of ffpa_hf."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers


def build() -> Any:
    """UNet, autoencoder and CLIP, the same weights on every call."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=4,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=[16, 32],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        norm_num_groups=8,
    )
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            hidden_size=32,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=100,
            bos_token_id=0,
            eos_token_id=99,
            pad_token_id=1,
        )
    ).eval()
    pipe = diffusers.StableDiffusionPipeline(
        vae,
        text,
        None,
        unet,
        diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        None,
        None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Any, steps: int = 2) -> torch.Tensor:
    """One image `[1, 3, 16, 16]` in so many scheduler steps."""
    with torch.no_grad():
        text, nothing = pipe.text_encoder(torch.arange(14).reshape(2, 7))[0].chunk(2)
        return pipe(
            prompt_embeds=text,
            negative_prompt_embeds=nothing,
            num_inference_steps=steps,
            output_type="pt",
            generator=torch.Generator().manual_seed(0),
            height=16,
            width=16,
        ).images
