"""The processor beside what else people do to a diffusers model: LoRA, IP-Adapter, casting, offloading."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers_models as tiny  # noqa: E402
from diffusers.models import attention_processor as legacy  # noqa: E402

import ffpa_hf  # noqa: E402
from ffpa_hf import FFPAAttnProcessor  # noqa: E402
from ffpa_hf.processors import capture  # noqa: E402

TOLERANCE = 1e-5


def served_alike(model: Any, inputs: dict[str, Any], monkeypatch: Any) -> int:
    """Calls that went through `attend` while enabled; the output must not change when it is disabled."""
    with torch.no_grad():
        with tiny.counted(monkeypatch) as calls:
            enabled = tiny.run(model, inputs)
        ffpa_hf.disable(model)
        with tiny.counted(monkeypatch) as after:
            disabled = tiny.run(model, inputs)
    assert after == []
    assert (enabled - disabled).abs().max() <= TOLERANCE
    return len(calls)


@pytest.mark.parametrize("name", ["flux", "unet_sdxl"])
@pytest.mark.parametrize("order", ["adapter first", "adapter last"])
def test_lora(name, order, monkeypatch):
    peft = pytest.importorskip("peft")
    model, inputs = tiny.make(name)
    with torch.no_grad():
        plain = tiny.run(model, inputs)
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    steps = [lambda: model.add_adapter(config), lambda: ffpa_hf.enable(model)]
    for step in steps if order == "adapter first" else reversed(steps):
        step()
    with torch.no_grad():
        assert (tiny.run(model, inputs) - plain).abs().max() > 1e-4, "the adapter does nothing"
    assert served_alike(model, inputs, monkeypatch) == {"flux": 2, "unet_sdxl": 16}[name]


def test_loading_an_ip_adapter_keeps_acceleration_and_finds_its_processors(monkeypatch):
    model, inputs = tiny.make("unet_sdxl")
    model.set_attn_processor(FFPAAttnProcessor())
    weights: dict[str, torch.Tensor] = {}
    crossing = [name for name in model.attn_processors if name.endswith("attn2.processor")]
    for index, name in enumerate(crossing):
        width = model.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * index + 1}.{part}.weight"] = torch.randn(width, 64) / 8
    projection = {
        "proj.weight": torch.randn(4 * 64, 32),
        "proj.bias": torch.zeros(4 * 64),
        "norm.weight": torch.ones(64),
        "norm.bias": torch.zeros(64),
    }
    model._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": weights}])  # behind pipe.load_ip_adapter
    inputs["added_cond_kwargs"]["image_embeds"] = [torch.randn(2, 1, 32)]
    adapters = [p for p in model.attn_processors.values() if isinstance(p, legacy.IPAdapterAttnProcessor2_0)]
    assert len(adapters) == len(crossing) == 8
    with torch.no_grad():
        strong = tiny.run(model, inputs)
        for adapter in adapters:
            adapter.scale = [0.0]
        assert (tiny.run(model, inputs) - strong).abs().max() > 1e-4
        for adapter in adapters:
            adapter.scale = [1.0]
    assert served_alike(model, inputs, monkeypatch) == 24
    assert all(type(adapter) is legacy.IPAdapterAttnProcessor2_0 for adapter in adapters)


@pytest.mark.parametrize("name", ["flux", "unet_sdxl", "vae_wan"])
def test_layerwise_casting(name, monkeypatch):
    model, inputs = tiny.make(name)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    ffpa_hf.enable(model)
    assert served_alike(model, inputs, monkeypatch) == {"flux": 2, "unet_sdxl": 16, "vae_wan": 2}[name]


@pytest.mark.parametrize("name", ["flux", "vae_wan"])
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.parametrize("order", ["offload first", "offload last"])
def test_group_offloading(name, kind, order, monkeypatch):
    model, inputs = tiny.make(name)
    cpu = torch.device("cpu")
    steps = [
        lambda: model.enable_group_offload(cpu, cpu, offload_type=kind, num_blocks_per_group=1),
        lambda: ffpa_hf.enable(model),
    ]
    for step in steps if order == "offload first" else reversed(steps):
        step()
    assert served_alike(model, inputs, monkeypatch) == 2


def test_accelerate_hooks_put_on_inline_attention_before_or_after(monkeypatch):
    """accelerate replaces `forward` on the instance; our subclass must still stand around it."""
    hooks = pytest.importorskip("accelerate.hooks")

    for hook_first in (True, False):
        model, inputs = tiny.make("vae_wan")
        attention = model.decoder.mid_block.attentions[0]
        steps = [
            lambda attention=attention: hooks.add_hook_to_module(attention, hooks.ModelHook()),
            lambda model=model: ffpa_hf.enable(model),
        ]
        for step in steps if hook_first else reversed(steps):
            step()
        assert served_alike(model, inputs, monkeypatch) == 2
        assert capture.slot_of(attention) is None
