"""Run by test_backend.py, one process per rank: a tiny Flux under diffusers' context parallelism, with ffpa attention.

Arguments: rank, rendezvous file.
Exits non-zero where the split model's output or gradients differ from the whole model's.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import diffusers_models as tiny  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from diffusers import ContextParallelConfig, FluxTransformer2DModel  # noqa: E402

from ffpa_hf import FFPAAttnProcessor, disable  # noqa: E402

WORLD = 2


def main(rank: int, rendezvous: str) -> None:
    # diffusers divides by the number of accelerators, and asks torch which kind there is.
    torch.accelerator.device_count = lambda: 1
    torch._C._get_accelerator = lambda *_: torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    check(ring=WORLD, ulysses=1, processor_first=True)
    check(ring=1, ulysses=WORLD, processor_first=False)
    check(ring=1, ulysses=WORLD, processor_first=True)
    dist.destroy_process_group()


def check(ring: int, ulysses: int, processor_first: bool) -> None:
    """One kind of splitting; the processor may come before or after `enable_parallelism`."""
    torch.manual_seed(0)
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
    _, inputs = tiny.flux()
    expected = model(**inputs, return_dict=False)[0]
    expected.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    steps = [lambda: model.set_attn_processor(FFPAAttnProcessor()), lambda: model.enable_parallelism(config=config)]
    model.set_attention_backend("ffpa")  # what diffusers asks for before it splits anything
    for step in steps if processor_first else reversed(steps):
        step()
    result = model(**inputs, return_dict=False)[0]
    result.square().sum().backward()
    assert (result - expected).abs().max() <= 1e-5, (result - expected).abs().max()
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None or "attn" not in name:
            continue
        total = parameter.grad.clone()
        dist.all_reduce(total)
        error = (total - gradients[name]).abs().max() / gradients[name].abs().max()
        assert error <= 1e-5, (name, error)
        compared += 1
    assert compared > 8
    disable(model)
    with torch.no_grad():
        assert (model(**inputs, return_dict=False)[0] - expected).abs().max() <= 1e-5, "lost when disabled"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
