"""Compile, for a GPU that is not here, every kernel that a set of calls would launch; print each as a JSON line.

    python tests/kernels/triton_ahead.py cuda 90 512,causal 320,bias
    python tests/kernels/triton_ahead.py table            # the whole grid for every target, as docs/kernels.md shows it

Runs in a process of its own, without the interpreter: a stand-in driver names the target, and launches only compile. A
call is a head dim and features: causal, window, mask, bias, dropout, softcap, sinks, fp16; groups (of two heads),
shared (one key head); few (rows), decode (fewer; keys split or, with single, not), one (row); wide and many (heads
enough for the wide forward's two configs); or qkv, for what stands before attention, and across, complex, halves. A
line holds the kernel's shared memory and binary size in bytes, registers, spilled bytes per thread, and how often the
listing has some instructions. TRITON_CACHE_DIR says where finished kernels are kept, so that an interrupted table goes
on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ffpa_hf.kernels.common import AttentionInputs
from ffpa_hf.kernels.triton import configs, launch, qkv_kernels
from ffpa_hf.masks import RowIntervals

LENGTH = 1000  # no multiple of a tile
FEW = 8  # rows for which the small tiles are chosen
DECODED = 7  # rows of a decoding step
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


#: Every kind of GPU that the kernels are compiled for.
TARGETS = (
    ("cuda", "80"), ("cuda", "86"), ("cuda", "89"), ("cuda", "90"), ("cuda", "100"), ("cuda", "120"),
    ("hip", "gfx942"), ("hip", "gfx1100"),
)  # fmt: skip
#: Head dims that reach every tile of the tables on some target (a test says so), and what is asked of each.
HEAD_DIMS = (64, 72, 128, 136, 160, 192, 256, 320, 384, 512, 520, 1024)
FEATURES = (
    "", "causal,groups", "window,sinks", "mask,softcap,fp16", "bias,dropout", "few", "few,window,bias", "wide,causal",
    "many", "many,mask", "decode,groups", "decode,window,sinks,dropout,fp16", "decode,many,groups,mask,softcap",
    "decode,single,bias", "decode,wide,shared", "decode,many,shared,one",
)  # fmt: skip


def target_of(backend: str, arch: str) -> configs.Target:
    """The limits that the tables are asked with."""
    return configs.target_for(None if backend == "hip" else divmod(int(arch), 10), backend == "hip")


def grid(head_dim: int) -> list[str]:
    """The calls of one head dim; narrow heads have no wide forward."""
    return [
        f"{head_dim},{features}".rstrip(",")
        for features in FEATURES
        if head_dim > 256 or not features.startswith(("wide", "many"))
    ]


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
            registers, spilled = resources(built.asm)
            print(json.dumps({
                "kernel": self.name,
                "shared": built.metadata.shared,
                "binary_bytes": len(built.asm[binary]),
                "registers": registers,
                "spilled_bytes": spilled,
                "wgmma": listing.count("wgmma.mma_async"),
                "mma": listing.count("mma.sync"),
                "tma": listing.count("cp.async.bulk.tensor"),
            }), flush=True)  # fmt: skip

        return compile_only


def resources(asm: dict[str, Any]) -> tuple[int, int]:
    """(registers, spilled bytes) of a thread: AMD's own notes, or the stack that cuobjdump sees; we use no other."""
    if "amdgcn" in asm:
        notes = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", asm["amdgcn"]))
        return int(notes["vgpr_count"]), 4 * int(notes["vgpr_spill_count"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return int(registers), int(stack)


def watch() -> None:
    """Put every kernel of the launcher behind `Compiled`."""
    for holder, names in (
        (launch, ("attention_forward", "forward_scores", "forward_product", "decode_split", "decode_combine")),
        (launch.device, ("row_delta", "backward_scores", "gradient_query", "gradient_key", "gradient_bias")),
        (launch.fused, ("key_reach", "gradient_key_value")),
        (qkv_kernels, ("place_stream",)),
    ):
        for name in names:
            setattr(holder, name, Compiled(name, getattr(holder, name)))


def inputs_of(head_dim: int, features: set[str]) -> AttentionInputs:
    dtype = torch.float16 if "fp16" in features else torch.bfloat16
    heads = 32 if "many" in features else 16 if "wide" in features else 2
    rows = 1 if "one" in features else FEW if "few" in features else DECODED if "decode" in features else LENGTH
    query = torch.empty(1, heads, rows, head_dim, dtype=dtype)
    kv_heads = 1 if "shared" in features else heads // 2 if "groups" in features else heads
    key = torch.empty(1, kv_heads, LENGTH, head_dim, dtype=dtype)
    inputs = AttentionInputs(query, key, torch.empty_like(key), scale=0.1, is_causal="causal" in features)
    if "window" in features:
        intervals = RowIntervals.sliding_window(rows, LENGTH, 100)
        first, last = intervals.query_ranges(LENGTH)
        inputs = dataclasses.replace(
            inputs, row_start=intervals.start, row_end=intervals.end, block_start=first, block_end=last,
            key_mask=torch.ones(1, LENGTH, dtype=torch.bool),
        )  # fmt: skip
    if "mask" in features:
        inputs = dataclasses.replace(inputs, mask=torch.ones(1, 1, rows, LENGTH, dtype=torch.bool))
    if "bias" in features:
        inputs = dataclasses.replace(inputs, bias=torch.empty(1, heads, rows, LENGTH))
    if "dropout" in features:
        inputs = dataclasses.replace(inputs, dropout_p=0.1, rng_state=torch.zeros(2, dtype=torch.int64))
    if "softcap" in features:
        inputs = dataclasses.replace(inputs, softcap=30.0)
    if "sinks" in features:
        inputs = dataclasses.replace(inputs, sinks=torch.empty(heads))
    return inputs


def place_streams(head_dim: int, features: set[str]) -> None:
    """Two streams into one buffer, the second with a rotary table: real, or complex with "complex"."""
    dtype = torch.float16 if "fp16" in features else torch.bfloat16
    heads, across = 24, "across" in features
    streams = [torch.empty(1, rows, heads, head_dim, dtype=dtype) for rows in (77, LENGTH)]
    weights = [torch.empty(heads * head_dim if across else head_dim, dtype=dtype) for _ in streams]
    table = torch.empty(1, LENGTH, head_dim // 2, 2)
    if "complex" in features:
        table = table[..., :1].expand(-1, -1, -1, 2)
    qkv_kernels.join_streams(
        streams, weights, [1e-6] * 2, [None, table], [None, table], across, "halves" not in features
    )


def compile_for(backend: str, arch: str, *calls: str) -> None:
    """Print the kernels of `calls` for one target. The target stays set for the whole process."""
    warp = 64 if arch.startswith("gfx9") else 32
    driver.set_active(StandInDriver(GPUTarget(backend, arch if backend == "hip" else int(arch), warp)))
    target = target_of(backend, arch)
    launch._target = lambda where: target
    launch._overlaps = lambda target, where: target.tma
    watch()
    for call in calls:
        head_dim, *features = call.split(",")
        if "qkv" in features:
            place_streams(int(head_dim), set(features))
            continue
        inputs = inputs_of(int(head_dim), set(features))
        processors = 1 if "single" in features else 132
        launch._processors = lambda where, count=processors: count
        out, lse, stats = launch.forward(inputs, 1024)
        needs = (True, True, True, inputs.bias is not None, False)
        launch.backward(inputs, out, lse, stats, out, None, needs, 1024)


def compiled(backend: str, arch: str, *calls: str) -> list[dict[str, Any]]:
    """What `compile_for` prints, one dict for each kernel, from a process of its own.

    Raises RuntimeError with the end of its messages where a kernel does not compile.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = f"{root}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    run = subprocess.run(
        [sys.executable, __file__, backend, arch, *calls], env=environment, capture_output=True, text=True, timeout=1800
    )
    if run.returncode:
        raise RuntimeError(f"{backend} {arch} {calls}: {run.stderr[-3000:]}")
    return [json.loads(line) for line in run.stdout.splitlines()]


def print_table() -> None:
    """One row for each target: kernels, most shared memory beside its limit, registers, and the kernels that spill."""
    print(f"Triton {triton.__version__}\n")
    print("| target | kernels | most shared memory, KB (limit) | most registers | that spill: worst bytes per thread |")
    print("|---|---|---|---|---|")
    for backend, arch in TARGETS:
        rows: list[dict[str, Any]] = []
        for head_dim in HEAD_DIMS:
            rows += compiled(backend, arch, *grid(head_dim))
        limit = target_of(backend, arch).smem_limit
        shared = max(row["shared"] for row in rows)
        assert shared <= limit, (backend, arch, shared)
        spills: dict[str, int] = {}
        for row in rows:
            if row["spilled_bytes"]:
                spills[row["kernel"]] = max(spills.get(row["kernel"], 0), row["spilled_bytes"])
        words = ", ".join(f"{name} {most}" for name, most in sorted(spills.items())) or "none"
        name = arch if backend == "hip" else f"sm_{arch}"
        count = len({json.dumps(row, sort_keys=True) for row in rows})
        registers = max(row["registers"] for row in rows)
        print(f"| {name} | {count} | {shared / 1024:.0f} ({limit // 1024}) | {registers} | {words} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["table"]:
        print_table()
    else:
        compile_for(*sys.argv[1:])
