"""Run by test_transformers_interface.py, one process per rank: tiny models under FSDP2 with "ffpa" attention.

Arguments: rank, rendezvous file. Exits non-zero where a mask did not stay intervals, or where the sharded model's
gradients differ from those of "eager" in float32 in one process.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny_transformers as tiny  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

from ffpa_hf.masks import RowIntervals  # noqa: E402
from ffpa_hf.patches import attention_interface  # noqa: E402

WORLD = 2
seen: list[object] = []


def main(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    attend = attention_interface.attend

    def spy(*arguments, attn_mask, **options):
        seen.append((type(attn_mask), arguments[0].dtype))
        return attend(*arguments, attn_mask=attn_mask, **options)

    attention_interface.attend = spy
    check("gemma4", MixedPrecisionPolicy(), 2e-5)
    check("mistral", MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 0.03)
    dist.destroy_process_group()


def check(family: str, policy: MixedPrecisionPolicy, tolerance: float) -> None:
    """Each rank trains on one row of the batch; together they must have the gradients of the whole batch."""
    inputs = tiny.batch("left")
    model = tiny.model(family, "ffpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    seen.clear()
    row = {name: tensor[dist.get_rank() : dist.get_rank() + 1] for name, tensor in inputs.items()}
    loss_of(model, row).backward()
    dtype = policy.param_dtype or torch.float32
    kinds = [kind for kind, _ in seen]
    assert kinds.count(RowIntervals) == len(kinds) == 4, seen  # two layers, forward and recomputed
    assert {given for _, given in seen} == {dtype}, seen

    whole = tiny.model(family, "eager").train()
    for each in range(WORLD):
        (loss_of(whole, {name: tensor[each : each + 1] for name, tensor in inputs.items()}) / WORLD).backward()
    for name, parameter in model.named_parameters():
        wanted = whole.get_parameter(name).grad
        error = (parameter.grad.full_tensor() - wanted).norm() / wanted.norm()
        assert error < tolerance, f"{family} {name}: {error:.1e}"


def loss_of(model: torch.nn.Module, row: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(**row, use_cache=False).logits.float()[row["attention_mask"].bool()]
    return (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).mean()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
