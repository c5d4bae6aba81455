"""Thousands of mixed calls in one process: memory stays flat, and nothing is compiled after the first round.

    python scripts/soak.py --calls 10000

One round is every kind of call once; the rounds go through them in another order each. Exit code 1: memory grew,
something was compiled late, a thread was left behind, or a call's result changed from one round to another.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import ffpa_hf  # noqa: E402
from ffpa_hf import RowIntervals, dispatch, ffpa_attn_func, ffpa_attn_varlen_func  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
#: What the allocator or the process may hold more at the end than after the second round.
SLACK_MB = 8 if ON_GPU else 24


def kinds() -> list[tuple[str, Callable[[], list[Tensor]]]]:
    """(name, call) of every kind of call: backends, head dims, masks, with and without gradient, decoding, packs."""
    lengths = ((256, 512), (1, 1024), (700, 700)) if ON_GPU else ((12, 20), (1, 30))
    backends = ("triton", "cuda", "sdpa", None) if ON_GPU else ("sdpa", None)
    widths = (64, 256, 512) if ON_GPU else (16, 40)
    made: list[tuple[str, Callable[[], list[Tensor]]]] = []

    def add(name: str, width: int, q_len: int, kv_len: int, backend: str | None, grad: bool, **more: Any) -> None:
        generator = torch.Generator(DEVICE).manual_seed(len(made))
        tensors = [torch.randn(1, heads, length, width, device=DEVICE, generator=generator).to(DTYPE)
                   for heads, length in ((4, q_len), (2, kv_len), (2, kv_len))]  # fmt: skip

        def call() -> list[Tensor]:
            leaves = [tensor.detach().requires_grad_(grad) for tensor in tensors]
            out = ffpa_attn_func(*leaves, enable_gqa=True, backend=backend, **more)
            return [out.detach(), *(torch.autograd.grad(out.sum(), leaves) if grad else ())]

        made.append((f"{name} D={width} {q_len}x{kv_len} {backend} {'step' if grad else 'forward'}", call))

    for index, width in enumerate(widths):
        for q_len, kv_len in lengths:
            for backend in backends:
                keep = torch.rand(q_len, kv_len, device=DEVICE) > 0.2
                window = RowIntervals.sliding_window(q_len, kv_len, 9, DEVICE)
                add("plain", width, q_len, kv_len, backend, grad=True)
                add("causal", width, q_len, kv_len, backend, grad=index == 0, is_causal=True)
                add("bool", width, q_len, kv_len, backend, grad=False, attn_mask=keep)
                add("window", width, q_len, kv_len, backend, grad=q_len > 1, attn_mask=window)
    tensors = [torch.randn(30, 2, 64, device=DEVICE).to(DTYPE) for _ in range(3)]
    offsets = torch.tensor([0, 7, 7, 30], dtype=torch.int32, device=DEVICE)
    made.append(("packed", lambda: [ffpa_attn_varlen_func(*tensors, offsets, offsets, 23, 23, causal=True)]))

    def refused() -> list[Tensor]:
        try:
            ffpa_attn_func(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 9), torch.zeros(1, 1, 4, 8))
        except ValueError:
            return []
        raise AssertionError("a wrong call was not refused")

    made.append(("refused", refused))
    return made


def memory() -> int:
    """Bytes held: what torch has allocated on a GPU, else the resident memory of the process."""
    gc.collect()
    if ON_GPU:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    import resource

    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Compilations:
    """Counts kernels that are compiled or loaded anew, by both compilers."""

    def __init__(self) -> None:
        self._triton = 0
        if ON_GPU:
            from triton import knobs

            knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, *_: Any, **__: Any) -> None:
        self._triton += 1

    def count(self) -> int:
        """How many so far."""
        program = sys.modules.get("ffpa_hf.kernels.cuda.program")
        return self._triton + (0 if program is None else program._load.cache_info().misses)


def soak(calls: int, order: int = 0) -> dict[str, Any]:
    """Run `calls` calls; figures, and under "faults" what was not as it should be."""
    every, compiled, faults = kinds(), Compilations(), []
    chance, begun = random.Random(order), time.monotonic()
    threads, first, done, rounds = threading.active_count(), {}, 0, 0
    after_warmup = compiled_before = plans = 0
    while done < calls or rounds < 3:
        for index in chance.sample(range(len(every)), len(every)):
            name, call = every[index]
            sums = [result.double().sum() for result in call()]  # read back below, once a round
            first.setdefault(index, sums)
            if rounds % 10 == 1:
                for got, want in zip(sums, first[index], strict=True):
                    if not torch.allclose(got, want, rtol=1e-3, atol=1e-2):
                        faults.append(f"{name}: another result in round {rounds}")
            done += 1
        rounds += 1
        if rounds == 2:
            after_warmup, compiled_before, plans = memory(), compiled.count(), len(dispatch._recalled)
    grown = (memory() - after_warmup) / 2**20
    late = compiled.count() - compiled_before
    if grown > SLACK_MB:
        faults.append(f"memory grew by {grown:.1f} MiB")
    if late:
        faults.append(f"{late} kernels compiled after the second round")
    if len(dispatch._recalled) > plans:
        faults.append("plans are remembered without end")
    if threading.active_count() > threads + ON_GPU:  # autograd keeps one of its own for each GPU
        faults.append(f"{threading.active_count() - threads} threads left behind")
    return {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "calls": done, "kinds": len(every), "seconds": round(time.monotonic() - begun, 1),
        "grown_mb": round(grown, 2), "compiled": compiled_before, "compiled_late": late, "faults": faults,
        "served": sorted({str(row.backend) for row in ffpa_hf.report().rows}),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--order", type=int, default=0, help="seed of the order of calls")
    given = parser.parse_args(arguments)
    import warnings

    warnings.simplefilter("ignore", ffpa_hf.FallbackWarning)  # short calls of a named kernel go to SDPA, rightly
    found = soak(given.calls, given.order)
    print(json.dumps(found, indent=1))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
