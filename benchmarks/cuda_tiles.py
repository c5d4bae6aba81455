"""Try tile configurations of the CUDA C++ forwards for Hopper: correctness first, then a table of times.

    python benchmarks/cuda_tiles.py --out DIR [--only 512,384] [--checks-only | --times-only]

1. Compiles what is needed, in as many processes as there are cores (this needs no GPU; --compile-only stops here).
2. Checks every mask and layout of each head dim, forward only, against float64 with outputs that held NaN. Each head
   dim has a process of its own, started ahead; the limit of a check counts from when that process had made its CUDA
   context and been told to go, and no two run on the GPU at a time. "HANG" means that one check took longer than that.
3. Times each configuration (medians over CUDA events), after a check of its own. FLOPs: 4 B H D for each allowed pair.

A line is printed as each part ends, and all is written to DIR/cuda_tiles.json. A full run is meant for two minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from ffpa_hf.kernels import reference, selftest
from ffpa_hf.kernels.common import AttentionInputs, aligned
from ffpa_hf.kernels.cuda import configs, launch, program

T, W = configs.TmaConfig, configs.TwinConfig
#: Head dims to check in the configurations of the tables, among them ones that end within a 64-column chunk.
CHECKED = (64, 72, 96, 128, 160, 192, 200, 256, 320, 328, 384, 448, 456, 512)
#: Configurations to time, by head dim; the first is checked like the tables' own, the others on two plain calls.
TIMED: dict[int, list[Any]] = {
    64: [T(128, 3, 1, 8), T(128, 3, 1, 8, turns=True), T(192, 2, 1, 8, turns=True), T(160, 2, 1, 8, turns=True)],
    128: [
        T(176, 2, 2, 4, turns=True), T(176, 2, 2, 4), T(128, 2, 2, 6, turns=True), T(128, 2, 2, 6), T(80, 3, 2, 6),
    ],
    192: [T(112, 2, 3, 4), T(128, 2, 3, 3)],
    256: [T(80, 2, 4, 4), T(80, 2, 4, 4, turns=True), T(80, 2, 2, 8), T(64, 2, 4, 5)],
    320: [T(64, 2, 3, 6), T(64, 2, 3, 6, turns=True), T(64, 2, 1, 17)],
    384: [W(64, 3, 4), W(64, 3, 4, late=True), W(64, 2, 7), W(64, 2, 7, late=True), W(96, 1, 8)],
    448: [W(64, 2, 6), W(64, 2, 6, late=True)],
    512: [W(64, 2, 5), W(64, 2, 5, late=True)],
}  # fmt: skip
#: Batch, heads and length of the timed calls: CogVideoX, FLUX, else 32 heads of 8192 rows.
SHAPES = {64: (2, 48, 17776), 128: (1, 24, 4608)}
LIMIT = 10.0  # seconds of one check or timed configuration
START = 120.0  # seconds for imports and the context
AHEAD = 6  # processes started ahead
INTERVALS = ("window", "lower right", "packed", "holes", "far apart")


def use(head_dim: int, config: Any) -> bool:
    """Put a configuration in the place of the tables' own; False where it does not fit the device."""
    twin = head_dim > configs.WIDEST_TMA
    if (configs.twin_smem if twin else configs.tma_smem)(config, head_dim) > 227 * 1024:
        return False
    if twin:
        configs.choose_twin = lambda head_dim, causal=False: config
    else:
        configs.choose_tma = lambda head_dim, causal=False, masked=False: config
    launch._hopper_variant.cache_clear()
    return True


def checks_of(head_dim: int) -> list[selftest.Check]:
    """The self-test's features that a forward without dropout, softcap and sinks has."""
    half = (torch.bfloat16, torch.float16)[CHECKED.index(head_dim) % 2]
    made = [replace(selftest.Check(half, head_dim), **feature) for feature in selftest._FEATURES]
    made = [c for c in made if c.softcap is None and not (c.sinks or c.dropout_p or c.broadcast_grad or c.grad_lse)]
    return [*made, selftest.Check(half, head_dim, 1000, 1100, kv_heads=2), selftest.Check(half, head_dim, 130, 65)]


def variant_of(check: selftest.Check) -> program.Variant:
    bias = {"bias": check.dtype, "bias minima": check.dtype, "bias float32": torch.float32}.get(check.mask)
    return launch.hopper_variant(
        check.head_dim, check.dtype, causal=check.mask == "causal", intervals=check.mask in INTERVALS,
        mask=check.mask in ("bool", "bool keys"), key_mask=check.mask == "holes", bias=bias,
    )  # fmt: skip


def compile_one(variant: program.Variant) -> str:
    try:
        program.compile_variant(variant)
    except RuntimeError as error:
        return f"{variant}: {str(error)[:160]}"
    return ""


def variants(head_dims: list[int], checks: bool, times: bool) -> list[program.Variant]:
    own = configs.choose_tma, configs.choose_twin
    wanted = [variant_of(check) for head_dim in head_dims if checks for check in checks_of(head_dim)]
    for head_dim in head_dims if times else ():
        for config in TIMED.get(head_dim, ()):
            if use(head_dim, config):
                wanted += [launch.hopper_variant(head_dim, torch.bfloat16, causal=causal) for causal in (False, True)]
    configs.choose_tma, configs.choose_twin = own
    return list(dict.fromkeys(wanted))


# --- in a process of its own ------------------------------------------------------------------------------------------


def run_check(check: selftest.Check) -> str:
    """Empty where out and log-sum-exp are right, else what is wrong."""
    problem = selftest._build(check, torch.device("cuda"))
    inputs = replace(problem.inputs, **{n: aligned(getattr(problem.inputs, n)) for n in ("query", "key", "value")})
    with selftest.nan_in_new_memory():
        out, lse, _ = launch.forward(inputs, "tma")
        again, lse_again, _ = launch.forward(inputs, "tma")
    exact, exact_lse = reference.attention(
        inputs.query.double(), inputs.key.double(), inputs.value.double(), scale=inputs.scale,
        is_causal=inputs.is_causal, mask=None if problem.hidden is None else ~problem.hidden,
        bias=None if inputs.bias is None else inputs.bias.double(),
    )  # fmt: skip
    whole, single = selftest.distances(out, exact)
    off = selftest._lse_error(lse, selftest._as_kernels_give(exact_lse))
    rounding = selftest.ROUNDING[check.dtype]
    if not (whole <= 3 * rounding and single <= 12 * rounding and off <= selftest._LSE_LIMIT):
        return f"out {whole:.1e}, one element {single:.1e}, lse {off:.1e}"
    return "" if torch.equal(out, again) and torch.equal(lse, lse_again) else "differs when run again"


def median_ms(run: Any, times: int = 8) -> float:
    run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[times // 2]


def draw(batch: int, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int) -> AttentionInputs:
    def normal(count: int, length: int) -> torch.Tensor:
        return torch.randn(batch, count, length, head_dim, device="cuda", dtype=torch.bfloat16)

    return AttentionInputs(normal(heads, rows), normal(kv_heads, keys), normal(kv_heads, keys), scale=head_dim**-0.5)


def time_one(head_dim: int, config: Any) -> str:
    """TFLOP/s dense and causal, with the larger error of two small calls."""
    errors = []
    for causal in (False, True):
        small = replace(draw(1, 4, 2, 700, 900, head_dim), is_causal=causal)
        with selftest.nan_in_new_memory():
            out, _, _ = launch.forward(small, "tma")
        exact, _ = reference.attention(
            small.query.double(), small.key.double(), small.value.double(), scale=small.scale, is_causal=causal
        )
        errors.append(selftest.distances(out, exact)[0])
    batch, heads, length = SHAPES.get(head_dim, (1, 32, 8192))
    calls = {"dense": draw(batch, heads, heads, length, length, head_dim)}
    calls["causal"] = replace(calls["dense"], is_causal=True)
    if head_dim == 512:
        dense = calls["dense"]
        calls["causal 32:4"] = replace(calls["causal"], key=dense.key[:, :4], value=dense.value[:, :4])
        calls["one head 16k"] = draw(1, 1, 1, 16384, 16384, head_dim)
    words = []
    for name, inputs in calls.items():
        b, h, n, d = inputs.query.shape
        pairs = n * (n + 1) / 2 if inputs.is_causal else n * n
        rate = 4e-9 * b * h * d * pairs / median_ms(lambda inputs=inputs: launch.forward(inputs, "tma"))
        words.append(f"{name} {rate:.0f}")
    good = max(errors) <= 3 * selftest.ROUNDING[torch.bfloat16]
    return f"{', '.join(words)} TFLOP/s; error {max(errors):.1e}{'' if good else ' WRONG'}"


def child(head_dim: int, what: str, first: int) -> None:
    """Say "ready", wait for a line, then print one for each check or configuration from `first` on."""
    torch.ones(1, device="cuda").sum().item()
    print("ready", flush=True)
    sys.stdin.readline()
    for job in jobs_of(head_dim, what)[first:]:
        try:
            if what == "check":
                problem = run_check(job)
                print(f"{'WRONG' if problem else 'ok'} {job} {problem}".rstrip(), flush=True)
            elif use(head_dim, job):
                print(f"D={head_dim} {job}: {time_one(head_dim, job)}", flush=True)
            else:
                print(f"D={head_dim} {job}: does not fit", flush=True)
        except Exception as error:
            print(f"WRONG D={head_dim} {job}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            if isinstance(error, RuntimeError):  # a broken context answers nothing more
                os._exit(1)


# --- the one that watches ---------------------------------------------------------------------------------------------


class Watched:
    """A child and the lines it has printed. script: what it runs; other scripts have children of the same manners."""

    script = __file__

    def __init__(self, head_dim: int, what: str, first: int = 0) -> None:
        self.head_dim, self.what, self.first = head_dim, what, first
        command = [sys.executable, self.script, "--child", str(head_dim), what, str(first)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put(None)

    def results(self, count: int) -> list[str]:
        """One line for each job from `first` on; it ends early at a hang or a death, of which the last line tells."""
        given: list[str] = []
        try:
            if self.lines.get(timeout=START) != "ready":
                return ["WRONG: the process died before it had a context"]
            assert self.process.stdin is not None
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            while len(given) < count:
                line = self.lines.get(timeout=LIMIT)
                if line is None:
                    return given if given and given[-1].startswith("WRONG") else [*given, "WRONG: the process died"]
                given.append(line)
        except (queue.Empty, BrokenPipeError):
            given.append("HANG")
        finally:
            self.process.kill()
            self.process.wait()
        return given


def jobs_of(head_dim: int, what: str) -> list[Any]:
    return checks_of(head_dim) if what == "check" else TIMED[head_dim]


def watch(
    head_dims: list[int], what: str, jobs_of: Any = jobs_of, kind: type[Watched] = Watched
) -> dict[str, list[str]]:
    """The lines of every head dim. Processes start ahead and work one after the other."""
    waiting = [(head_dim, 0) for head_dim in head_dims]
    started: list[Watched] = []
    found: dict[str, list[str]] = {}
    while waiting or started:
        while waiting and len(started) < AHEAD:
            started.append(kind(waiting[0][0], what, waiting.pop(0)[1]))
        one = started.pop(0)
        jobs = jobs_of(one.head_dim, what)
        count = len(jobs) - one.first
        lines = one.results(count)
        if lines[-1] == "HANG":
            lines[-1] = f"HANG D={one.head_dim} {jobs[one.first + len(lines) - 1]}"
        bad = [line for line in lines if line.startswith(("WRONG", "HANG"))]
        if what == "check":
            print(f"D={one.head_dim}: {len(lines) - len(bad)} of {count} right", *bad[:3], sep=" | ", flush=True)
        else:
            print(*lines, sep="\n", flush=True)
        found.setdefault(str(one.head_dim), []).extend(lines)
        if len(lines) < count and what == "time":  # checks of a head dim that hung once may all hang: go on elsewhere
            waiting.insert(0, (one.head_dim, one.first + len(lines)))
    return found


def command(
    text: str | None, name: str, checked: Any, timed: Any, variants: Any, jobs_of: Any, child: Any, kind: type[Watched]
) -> int:
    """The command line of a script like this one: compile, check, time, and keep the lines as `name`.json.

    checked, timed: head dims that have checks and times.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=f"folder of {name}.json")
    parser.add_argument("--only", default="", help="head dims by commas; default: all")
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--times-only", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(int(given.child[0]), given.child[1], int(given.child[2]))
        return 0
    begin = time.monotonic()
    head_dims = [int(word) for word in given.only.split(",") if word] or list(checked)
    unknown = sorted(set(head_dims) - set(checked))
    if unknown:
        parser.error(f"--only {unknown}: use {', '.join(map(str, checked))}")
    wanted = variants(head_dims, not given.times_only, not given.checks_only)
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        problems = [problem for problem in pool.imap_unordered(compile_one, wanted) if problem]
    print(*problems, f"{len(wanted)} kernels compiled, {time.monotonic() - begin:.0f} s", sep="\n", flush=True)
    if given.compile_only:
        return 1 if problems else 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("checks and times need an sm_90 GPU; --compile-only does not")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "compiler": program.compiler_version(),
        "command": " ".join([f"{name}.py", *sys.argv[1:]]),
    }  # fmt: skip
    print(result, flush=True)
    if not given.times_only:
        result["checks"] = watch(head_dims, "check", jobs_of, kind)
        print(f"checked, {time.monotonic() - begin:.0f} s", flush=True)
    if not given.checks_only:
        result["times"] = watch([head_dim for head_dim in head_dims if head_dim in timed], "time", jobs_of, kind)
    print(f"done, {time.monotonic() - begin:.0f} s", flush=True)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{name}.json").write_text(json.dumps(result, indent=1), "utf-8")
    lines = [line for part in ("checks", "times") for found in result.get(part, {}).values() for line in found]
    return 1 if problems or any("WRONG" in line or "HANG" in line for line in lines) else 0


if __name__ == "__main__":
    raise SystemExit(command(__doc__, "cuda_tiles", CHECKED, TIMED, variants, jobs_of, child, Watched))
