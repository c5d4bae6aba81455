"""Run by test_backend.py, one process per rank: tiny models under diffusers' context parallelism, with ffpa attention.

Arguments: rank, number of ranks (2: ring and Ulysses; 4: both at once), rendezvous file.
Exits non-zero where the split model's output or gradients differ from the whole model's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import diffusers_models as tiny  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from diffusers import ContextParallelConfig, FluxTransformer2DModel, QwenImageTransformer2DModel  # noqa: E402

from ffpa_hf import FFPAAttnProcessor, disable  # noqa: E402


def main(rank: int, world: int, rendezvous: str) -> None:
    # diffusers divides by the number of accelerators, and asks torch which kind there is.
    torch.accelerator.device_count = lambda: 1
    torch._C._get_accelerator = lambda *_: torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    if world == 4:
        check(flux, ring=2, ulysses=2, processor_first=True)
        check(wan, ring=2, ulysses=2, processor_first=False)
    else:
        check(flux, ring=world, ulysses=1, processor_first=True)
        check(flux, ring=1, ulysses=world, processor_first=False)
        check(flux, ring=1, ulysses=world, processor_first=True)
        check(wan, ring=world, ulysses=1, processor_first=False)
        check(wan, ring=1, ulysses=world, processor_first=True)
        check(qwen_image, ring=world, ulysses=1, processor_first=True)
        refused_under_ring(world)
    dist.destroy_process_group()


def flux() -> tuple[Any, dict[str, Any]]:
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return model, tiny.flux()[1]


def wan() -> tuple[Any, dict[str, Any]]:
    return tiny.wan()


def qwen_image() -> tuple[Any, dict[str, Any]]:
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    _, inputs = tiny.qwen_image()
    return model, {
        **inputs,
        "encoder_hidden_states": torch.randn(2, 8, 16),
        "encoder_hidden_states_mask": None,
    }


def split(model: Any, ring: int, ulysses: int, processor_first: bool) -> None:
    """The processor may come before or after `enable_parallelism`."""
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    steps = [lambda: model.set_attn_processor(FFPAAttnProcessor()), lambda: model.enable_parallelism(config=config)]
    model.set_attention_backend("ffpa")  # what diffusers asks for before it splits anything
    for step in steps if processor_first else reversed(steps):
        step()


def check(build: Any, ring: int, ulysses: int, processor_first: bool) -> None:
    """One model under one kind of splitting: output and the gradients of its attention."""
    torch.manual_seed(0)
    model, inputs = build()
    expected = model(**inputs, return_dict=False)[0]
    expected.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    split(model, ring, ulysses, processor_first)
    result = model(**inputs, return_dict=False)[0]
    result.square().sum().backward()
    what = f"{build.__name__}, ring {ring}, Ulysses {ulysses}"
    assert (result - expected).abs().max() <= 1e-5, (what, (result - expected).abs().max())
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None or "attn" not in name:
            continue
        total = parameter.grad.clone()
        dist.all_reduce(total)
        error = (total - gradients[name]).abs().max() / gradients[name].abs().max().clamp_min(1e-3)
        assert error <= 1e-4, (what, name, error)
        compared += 1
    assert compared > 8, what
    disable(model)
    with torch.no_grad():
        assert (model(**inputs, return_dict=False)[0] - expected).abs().max() <= 1e-5, f"{what}: lost when disabled"


def refused_under_ring(world: int) -> None:
    """diffusers would apply one rank's mask to every rank's keys."""
    model, inputs = qwen_image()
    split(model, ring=world, ulysses=1, processor_first=True)
    inputs["encoder_hidden_states_mask"] = (torch.arange(8) < torch.tensor([[8], [5]])).long()
    try:
        model(**inputs)
    except NotImplementedError as refusal:
        assert "ring" in str(refusal)
    else:
        raise AssertionError("a mask under ring attention went through")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
