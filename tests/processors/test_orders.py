"""Everything people do to a UNet's attention, in every order of three, our processor among them.

The same steps without ours are the truth. A step may be refused with ValueError, ours or diffusers'; then it has not
happened, and the rest goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

import diffusers_models as tiny  # noqa: E402
import sweep  # noqa: E402
from diffusers.models import attention_processor as legacy  # noqa: E402

import ffpa_hf  # noqa: E402
from ffpa_hf import FFPAAttnProcessor  # noqa: E402

TOLERANCE = 1e-5


def fuse(model: Any, inputs: dict[str, Any]) -> None:
    model.fuse_qkv_projections()


def unfuse(model: Any, inputs: dict[str, Any]) -> None:
    if getattr(model, "original_attn_processors", None) is not None:
        model.unfuse_qkv_projections()


def attention_slicing(model: Any, inputs: dict[str, Any]) -> None:
    model.set_attention_slice("auto")


def lora(model: Any, inputs: dict[str, Any]) -> None:
    torch.manual_seed(3)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


def ip_adapter(model: Any, inputs: dict[str, Any]) -> None:
    torch.manual_seed(4)
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
    model._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": weights}])
    inputs["added_cond_kwargs"] = {**inputs["added_cond_kwargs"], "image_embeds": [torch.randn(2, 1, 32)]}


def pag(model: Any, inputs: dict[str, Any]) -> None:
    """What its pipelines do for the length of a call."""
    saved = model.attn_processors
    attention = model.mid_block.attentions[0].transformer_blocks[0].attn1
    attention.processor = legacy.PAGIdentitySelfAttnProcessor2_0()
    model.set_attn_processor(dict(saved))


def shared_processor(model: Any, inputs: dict[str, Any]) -> None:
    model.set_attn_processor(FFPAAttnProcessor())


def enable(model: Any, inputs: dict[str, Any]) -> None:
    ffpa_hf.enable(model)


THEIRS: list[Callable[[Any, dict[str, Any]], None]] = [fuse, unfuse, attention_slicing, lora, ip_adapter, pag]


def after(steps: Any, refused: set[Any]) -> tuple[Any, dict[str, Any], set[Any]]:
    """A tiny SDXL UNet after these steps but the refused ones; and which were refused now."""
    model, inputs = tiny.make("unet_sdxl")
    now = set()
    for step in steps:
        if step in refused:
            continue
        try:
            step(model, inputs)
        except ValueError as refusal:
            assert len(str(refusal)) > 30, "a refusal is a sentence"
            now.add(step)
    return model, inputs, now


BROKEN = ((attention_slicing, ip_adapter), (ip_adapter, attention_slicing), (ip_adapter, fuse))


def cases() -> list[Any]:
    """Two steps of diffusers' and ours before, between or after them.

    Without ours, fusing and slicing lose an IP-Adapter, and none can be loaded over slicing: not ours to mend once it
    has happened.
    """
    found = []
    for pair in itertools.permutations(THEIRS, 2):
        for ours, place in ((shared_processor, 0), (shared_processor, 1), (shared_processor, 2), (enable, 1)):
            if place == 2 and pair in BROKEN:
                continue
            steps = [*pair[:place], ours, *pair[place:]]
            marks = [] if ours is shared_processor and place == 1 else [pytest.mark.slow]
            found.append(pytest.param(steps, ours, marks=marks, id="-".join(step.__name__ for step in steps)))
    return found


@pytest.mark.parametrize(("steps", "ours"), cases())
def test_every_order_is_right_or_refused(steps, ours):
    model, inputs, refused = after(steps, set())
    assert ours not in refused
    plain, plain_inputs, _ = after(steps, refused | {ours, attention_slicing})  # slicing never changes a number
    expected = sweep.run(plain, plain_inputs)
    assert (sweep.run(model, inputs) - expected).abs().max() <= TOLERANCE
    served = sum(row.calls for row in ffpa_hf.report(model))
    if steps == [fuse, ours, unfuse]:
        assert served == 0  # diffusers puts back the processors from before the fusing, ours was not among them
    else:
        assert served >= 16, f"only {served} calls are accelerated"
    assert unfused(model) == unfused(plain)
    ffpa_hf.disable(model)
    assert (sweep.run(model, inputs) - expected).abs().max() <= TOLERANCE


def unfused(model: Any) -> list[str]:
    """The keys of the state dict but those of fused layers, which diffusers leaves behind when it unfuses a UNet."""
    return [key for key in model.state_dict() if ".to_qkv." not in key and ".to_kv." not in key]
