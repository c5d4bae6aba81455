"""Compile, for a GPU that is not here, every kernel that a set of calls would launch; print each as a JSON line.

    python tests/kernels/triton_ahead.py cuda 90 512,causal 320,bias

Runs in a process of its own, without the interpreter: a stand-in driver names the target, and launches only compile. A
call is a head dim and features: causal, window, mask, bias, dropout, softcap, sinks, groups, wide, fp16.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ffpa_hf.kernels.common import AttentionInputs
from ffpa_hf.kernels.triton import configs, launch
from ffpa_hf.masks import RowIntervals

LENGTH = 1000  # no multiple of a tile


class StandInDriver:
    """Says which target to compile for; there is nothing to launch on."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """In a kernel's place: compiles for the arguments of a launch and prints one line."""

    def __init__(self, name: str, kernel: object) -> None:
        self.name, self.kernel = name, kernel

    def __getitem__(self, grid):
        def compile_only(*args, **kwargs):
            built = self.kernel.warmup(*args, grid=grid, **kwargs)
            binary = next(name for name in ("cubin", "hsaco") if name in built.asm)
            listing = built.asm.get("ptx", "")
            print(json.dumps({
                "kernel": self.name,
                "shared": built.metadata.shared,
                "binary_bytes": len(built.asm[binary]),
                "wgmma": listing.count("wgmma.mma_async"),
                "mma": listing.count("mma.sync"),
                "tma": listing.count("cp.async.bulk.tensor"),
            }), flush=True)  # fmt: skip

        return compile_only


def watch() -> None:
    """Put every kernel of the launcher behind `Compiled`."""
    for holder, names in (
        (launch, ("attention_forward", "forward_scores", "forward_product")),
        (launch.device, ("row_delta", "backward_scores", "gradient_query", "gradient_key", "gradient_bias")),
    ):
        for name in names:
            setattr(holder, name, Compiled(name, getattr(holder, name)))


def inputs_of(head_dim: int, features: set[str]) -> AttentionInputs:
    dtype = torch.float16 if "fp16" in features else torch.bfloat16
    heads = 16 if "wide" in features else 2
    query = torch.empty(1, heads, LENGTH, head_dim, dtype=dtype)
    key = torch.empty(1, heads // 2 if "groups" in features else heads, LENGTH, head_dim, dtype=dtype)
    inputs = AttentionInputs(query, key, torch.empty_like(key), scale=0.1, is_causal="causal" in features)
    if "window" in features:
        intervals = RowIntervals.sliding_window(LENGTH, LENGTH, 100)
        first, last = intervals.query_ranges(LENGTH)
        inputs = dataclasses.replace(
            inputs, row_start=intervals.start, row_end=intervals.end, block_start=first, block_end=last,
            key_mask=torch.ones(1, LENGTH, dtype=torch.bool),
        )  # fmt: skip
    if "mask" in features:
        inputs = dataclasses.replace(inputs, mask=torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool))
    if "bias" in features:
        inputs = dataclasses.replace(inputs, bias=torch.empty(1, heads, LENGTH, LENGTH))
    if "dropout" in features:
        inputs = dataclasses.replace(inputs, dropout_p=0.1, rng_state=torch.zeros(2, dtype=torch.int64))
    if "softcap" in features:
        inputs = dataclasses.replace(inputs, softcap=30.0)
    if "sinks" in features:
        inputs = dataclasses.replace(inputs, sinks=torch.empty(heads))
    return inputs


def main(backend: str, arch: str, *calls: str) -> None:
    rocm = backend == "hip"
    warp = 64 if arch.startswith("gfx9") else 32
    driver.set_active(StandInDriver(GPUTarget(backend, arch if rocm else int(arch), warp)))
    target = configs.target_for(None if rocm else divmod(int(arch), 10), rocm)
    launch._target = lambda where: target
    launch._processors = lambda where: 132
    watch()
    for call in calls:
        head_dim, *features = call.split(",")
        inputs = inputs_of(int(head_dim), set(features))
        out, lse, stats = launch.forward(inputs, 1024)
        needs = (True, True, True, inputs.bias is not None, False)
        launch.backward(inputs, out, lse, stats, out, None, needs, 1024)


if __name__ == "__main__":
    main(*sys.argv[1:])
