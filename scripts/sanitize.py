"""compute-sanitizer over small calls of every kernel backend: memcheck, racecheck, initcheck, synccheck.

    python scripts/sanitize.py                            # all four tools on all backends
    python scripts/sanitize.py --tools memcheck --backends cuda

Each tool runs `sanitize.py --work BACKEND` in a process of its own, after one run without it that compiles the kernels,
and with torch's caching allocator off, so that an access beside a tensor is one beside its allocation. Exit code 1: a
tool found something or a run failed; 2: compute-sanitizer is not installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
BACKENDS = ("triton", "cuda")
_FOUND = 99  # exit code of compute-sanitizer where it found an error


def work(backend: str) -> int:
    """Small calls, forward and backward, that reach every kernel and no tile's edge evenly; returns how many."""
    import torch

    from ffpa_hf import RowIntervals, ffpa_attn_func, settings

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    lengths = ((65, 130), (3, 200)) if device == "cuda" else ((5, 9), (1, 6))
    count = 0

    def attend(width: int, q_len: int, kv_len: int, *, grad: bool = True, **more: object) -> None:
        nonlocal count
        made = [torch.randn(1, heads, length, width, device=device).to(dtype)
                for heads, length in ((2, q_len), (1, kv_len), (1, kv_len))]  # fmt: skip
        leaves = [tensor.requires_grad_(grad) for tensor in made]
        out = ffpa_attn_func(*leaves, enable_gqa=True, backend=backend, **more)
        if grad:
            torch.autograd.grad(out, leaves, torch.randn_like(out))
        count += 1

    with settings.override(force_no_sdpa_fallback=True, allow_unqualified=True):
        for width in (72, 512) if device == "cuda" else (64,):
            for q_len, kv_len in lengths:
                keep = torch.rand(q_len, kv_len, device=device) > 0.3
                keep[0] = False
                attend(width, q_len, kv_len)
                attend(width, q_len, kv_len, is_causal=True)
                attend(width, q_len, kv_len, attn_mask=keep, grad=width != 72)
                attend(width, q_len, kv_len, attn_mask=torch.randn(q_len, kv_len, device=device), grad=width == 72)
                window = RowIntervals.sliding_window(q_len, kv_len, 7, device)
                attend(width, q_len, kv_len, attn_mask=window)
        attend(64, *lengths[0], dropout_p=0.3)
        if backend == "triton":
            attend(64, *lengths[0], softcap=3.0, sinks=torch.randn(2, device=device))
    if device == "cuda":
        torch.cuda.synchronize()
    return count


def find() -> str | None:
    """The compute-sanitizer of PATH, or of the CUDA toolkit."""
    for folder in (None, *(str(Path(os.environ[name]) / "bin") for name in ("CUDA_HOME", "CUDA_PATH")
                           if name in os.environ), "/usr/local/cuda/bin"):  # fmt: skip
        found = shutil.which("compute-sanitizer", path=folder)
        if found:
            return found
    return None


def sanitize(sanitizer: str, tool: str, backend: str, seconds: float) -> tuple[str, float, str]:
    """("clean", "ERRORS" or "FAILED", seconds, the end of the output) of one tool on one backend."""
    command = [sys.executable, str(Path(__file__).resolve()), "--work", backend]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if tool:
        more = {"memcheck": ["--leak-check", "no"], "racecheck": ["--racecheck-report", "analysis"]}.get(tool, [])
        options = ["--tool", tool, "--error-exitcode", str(_FOUND), "--target-processes", "all", *more]
        command = [sanitizer, *options, *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    begun = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "FAILED", time.monotonic() - begun, f"not done after {seconds:.0f} s"
    text = done.stdout + done.stderr
    nothing = not tool or re.search(r"SUMMARY: 0 (errors|hazards)", text) is not None
    clean = done.returncode == 0 and "calls done" in text and nothing
    verdict = "clean" if clean else "ERRORS" if done.returncode == _FOUND else "FAILED"
    return verdict, time.monotonic() - begun, text[-3000:]


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--seconds", type=float, default=300.0, help="most that one tool may take on one backend")
    parser.add_argument("--work", choices=BACKENDS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.work:
        print(f"{work(given.work)} calls done")
        return 0
    tools, backends = given.tools.split(","), given.backends.split(",")
    if not set(tools) <= set(TOOLS) or not set(backends) <= set(BACKENDS):
        parser.error(f"tools are {', '.join(TOOLS)}; backends {', '.join(BACKENDS)}")
    sanitizer = find()
    if sanitizer is None:
        print("compute-sanitizer was not found in PATH, CUDA_HOME/bin or /usr/local/cuda/bin", file=sys.stderr)
        return 2
    wrong = 0
    for backend in backends:
        for tool in ("", *tools):
            verdict, seconds, text = sanitize(sanitizer, tool, backend, given.seconds)
            print(f"{backend:<7} {tool or 'plain':<10} {verdict:<7} {seconds:6.1f} s", flush=True)
            if verdict != "clean":
                wrong += 1
                print(text)
                if not tool:  # it does not even run by itself
                    break
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
