"""The CuTe-DSL forward on the GPU at hand: float64 checks first, each in a process with a limit, then times.

    python benchmarks/cute_check.py [--seconds 20]

Kernels are compiled (or read from the cache) before a check's clock starts, so that the limit is one of running: a
kernel that waits for ever costs its own process alone. Prints the device, the versions, a line for each check and time.
Times are medians over CUDA events beside F.sdpa in one process; FLOPs 4 B H D for each allowed pair.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from ffpa_hf.backends import CuTeDSLBackend
from ffpa_hf.kernels import cute as backend
from ffpa_hf.kernels import selftest
from ffpa_hf.kernels.common import AttentionInputs
from ffpa_hf.kernels.cute import configs, launch

HEAD_DIMS = (64, 72, 128, 192, 256, 320)


def check(wanted: selftest.Check, ready, answer) -> None:
    """One float64 check; `ready` is set once what takes long before it is done."""
    dtype = str(wanted.dtype).removeprefix("torch.")
    launch.loaded(configs.choose(wanted.head_dim, dtype, wanted.mask == "causal"))
    torch.zeros(1, device="cuda")
    ready.set()
    outcome = selftest.run_check(backend, CuTeDSLBackend(), wanted, torch.device("cuda", 0))
    answer.put((outcome.passed, outcome.note, outcome.worst))


def checked(wanted: selftest.Check, seconds: float) -> bool:
    """Run a check in a process of its own; False where it fails, dies or is not done in time."""
    context = multiprocessing.get_context("spawn")
    ready, answer = context.Event(), context.Queue()
    process = context.Process(target=check, args=(wanted, ready, answer))
    process.start()
    ready.wait(60)
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        print(f"HANGS  {wanted}")
        return False
    passed, note, worst = answer.get(timeout=5) if process.exitcode == 0 else (False, f"exit {process.exitcode}", None)
    print(f"{'passed' if passed else 'FAILED'} {wanted}: {worst} {note}")
    return passed


def timed(head_dim: int, causal: bool) -> None:
    """32 heads, 8192 tokens, bfloat16."""
    query, key, value = (torch.randn(1, 32, 8192, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs = AttentionInputs(query, key, value, scale=head_dim**-0.5, is_causal=causal)
    calls = {
        "ffpa_hf/cute": lambda: launch.forward(inputs),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal),
    }
    flops = 4 * 32 * 8192**2 * head_dim / (2 if causal else 1)
    for name, call in calls.items():
        times = []
        for _ in range(13):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        ms = statistics.median(times[3:])
        print(f"D{head_dim} {'causal' if causal else 'dense '} {name:<13} {ms:8.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s")


def main() -> int:
    """Check, then time the head dims that passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of one check, compiling excluded")
    seconds = parser.parse_args().seconds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {' '.join(sys.argv)}")
    failed = 0
    for head_dim in HEAD_DIMS:
        wanted = [
            selftest.Check(torch.bfloat16, head_dim, 300, 300, kv_heads=2),
            selftest.Check(torch.bfloat16, head_dim, 520, 200, mask="causal"),
        ]
        if not all([checked(each, seconds) for each in wanted]):
            failed += 1
            continue
        for causal in (False, True):
            timed(head_dim, causal)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
