"""The models of the end-to-end benchmark: real dimensions, random weights, built on the device; nothing is downloaded.

Each comes with a tiny twin of the same architecture for CPUs. Norm weights are set so that softmaxes are neither
one-hot nor flat: with untouched random weights a wrong attention would hardly show. Knows nothing of clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Model:
    """How a model is built. build: called under the device and dtype it is to have; text: what it is, for lists."""

    name: str
    text: str
    dtype: torch.dtype
    build: Callable[[], Any]

    def make(self, device: torch.device, seed: int = 0) -> Any:
        """The model in eval mode on `device`, its weights drawn from `seed`."""
        before = torch.get_default_dtype()
        torch.manual_seed(seed)
        torch.set_default_dtype(self.dtype)
        try:
            with device:
                return self.build().eval()
        finally:
            torch.set_default_dtype(before)


def _gemma4(**sizes: Any) -> Callable[[], Any]:
    """A Gemma 4 text model without per-layer inputs; keys are values in its global layers, as in the 31B model."""

    def build() -> Any:
        from transformers import AutoModelForCausalLM, Gemma4TextConfig

        config = Gemma4TextConfig(
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            **sizes,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())
        for layer in model.model.layers:
            attention = layer.self_attn
            for norm in (attention.q_norm, attention.k_norm):  # the 1/sqrt(head_dim) that trained norms have learned
                torch.nn.init.constant_(norm.weight, attention.head_dim**-0.25)
        return model

    return build


def _autoencoder(channels: tuple[int, ...]) -> Callable[[], Any]:
    """AutoencoderKL with FLUX.1's 16 latent channels: one attention head, as wide as the last entry of `channels`."""

    def build() -> Any:
        from diffusers import AutoencoderKL

        model = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * len(channels),
            up_block_types=("UpDecoderBlock2D",) * len(channels),
            block_out_channels=channels,
            layers_per_block=2,
            latent_channels=16,
        )
        attention = model.decoder.mid_block.attentions[0]
        for projection in (attention.to_q, attention.to_k):
            projection.weight.data.mul_(3.0)
        return model

    return build


def _flux(**sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        from diffusers import FluxTransformer2DModel

        return _sharpened(FluxTransformer2DModel(guidance_embeds=True, **sizes))

    return build


def _wan(**sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        from diffusers import WanTransformer3DModel

        return _sharpened(WanTransformer3DModel(**sizes))

    return build


def _sharpened(model: Any) -> Any:
    """Make attention matter in a random diffusion transformer.

    Scores of unit-norm queries and keys have deviation one, a nearly flat softmax that averages values to nothing: 2.5
    lets some ten keys matter. Larger values bring what is left up to the size of the residual stream.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("norm_q.weight", "norm_k.weight", "norm_added_q.weight", "norm_added_k.weight")):
            torch.nn.init.constant_(parameter, 2.5**0.5)
        elif name.endswith((".to_v.weight", ".add_v_proj.weight")):
            parameter.data.mul_(8.0)
    return model


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            "gemma4_31b_6l",
            "Gemma 4 31B dimensions, 5 sliding layers and 1 global",
            torch.bfloat16,
            _gemma4(
                vocab_size=32768,
                hidden_size=5376,
                intermediate_size=21504,
                num_hidden_layers=6,
                num_attention_heads=32,
                num_key_value_heads=16,
                head_dim=256,
                global_head_dim=512,
                num_global_key_value_heads=4,
                sliding_window=1024,
            ),
        ),
        Model("vae", "AutoencoderKL of FLUX.1, decoder", torch.bfloat16, _autoencoder((128, 256, 512, 512))),
        Model("flux", "FLUX.1 transformer, 12B", torch.bfloat16, _flux()),
        Model("wan", "Wan 2.1 transformer, 14B", torch.bfloat16, _wan()),
        Model(
            "gemma4_tiny",
            "two layers of Gemma 4's architecture",
            torch.float32,
            _gemma4(
                vocab_size=256,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                layer_types=["sliding_attention", "full_attention"],
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                global_head_dim=128,
                num_global_key_value_heads=1,
                sliding_window=16,
            ),
        ),
        Model("vae_tiny", "AutoencoderKL of two blocks, decoder", torch.float32, _autoencoder((32, 64))),
        Model(
            "flux_tiny",
            "FLUX.1's architecture, three blocks",
            torch.float32,
            _flux(
                num_layers=1,
                num_single_layers=2,
                attention_head_dim=64,
                num_attention_heads=2,
                joint_attention_dim=32,
                pooled_projection_dim=32,
                axes_dims_rope=(16, 24, 24),
            ),
        ),
        Model(
            "wan_tiny",
            "Wan 2.1's architecture, two blocks",
            torch.float32,
            _wan(num_attention_heads=2, attention_head_dim=64, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=2),
        ),
    )
}
