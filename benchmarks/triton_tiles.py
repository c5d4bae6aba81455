"""Try tile configurations of the Triton kernels on the GPU at hand: correctness first, then a table of times.

    python benchmarks/triton_tiles.py --out DIR [--only fwd512,bwd512] [--skip-checks]

Prints the device, the versions and one line for each configuration, and writes it all to DIR/triton_tiles.json.
Kernels are compiled ahead by worker processes; times are medians over CUDA events in one run. FLOPs: forward 4 B H D
for each allowed pair of query and key, backward 2.5 times that, whatever a kernel recomputes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton

from ffpa_hf.backends import TritonBackend
from ffpa_hf.kernels import reference
from ffpa_hf.kernels import triton as backend
from ffpa_hf.kernels.common import AttentionInputs
from ffpa_hf.kernels.philox import philox_keep_mask
from ffpa_hf.kernels.triton import configs, launch
from ffpa_hf.masks import RowIntervals

F, S, P, W = configs.ForwardConfig, configs.ScoresConfig, configs.ProductConfig, configs.WideConfig
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One shape: batch, query and key heads, lengths, head dim, and how keys are masked."""

    heads: int
    kv_heads: int
    length: int
    head_dim: int
    mask: str = "none"
    batch: int = 1

    def pairs(self) -> float:
        full = self.length * self.length
        if self.mask == "causal":
            return (full + self.length) / 2
        if self.mask == "window":
            return self.length * 1024 - 1024 * 1023 / 2
        return full

    def flops(self, direction: str) -> float:
        once = 4.0 * self.batch * self.heads * self.head_dim * self.pairs()
        return once if direction == "fwd" else 2.5 * once


CASES = {
    "512": Case(32, 32, 8192, 512),
    "512causal": Case(32, 32, 8192, 512, "causal"),
    "512gqa": Case(32, 4, 8192, 512, "causal"),
    "512one": Case(1, 1, 16384, 512),
    "320": Case(32, 32, 8192, 320),
    "256": Case(32, 32, 8192, 256),
    "256window": Case(32, 16, 8192, 256, "window"),
    "384": Case(32, 32, 8192, 384),
    "1024": Case(16, 16, 4096, 1024),
    "640": Case(16, 16, 4096, 640),
    "128": Case(24, 24, 4608, 128),
    "64": Case(48, 48, 17776, 64, batch=2),
}

_WIDE = [
    W(S(128, 128, 64, 4, 3), P(128, 320, 64, 8, 4)),
    W(S(128, 128, 32, 4, 4), P(128, 320, 64, 8, 4)),
    W(S(128, 256, 64, 8, 3), P(128, 320, 64, 8, 4)),
    W(S(128, 128, 64, 8, 4), P(128, 320, 64, 8, 3)),
    W(S(256, 128, 64, 8, 3), P(256, 128, 64, 8, 4)),
]
FORWARD: dict[str, list] = {
    "512": [F(64, 128, 0, 512, 8, 1), *_WIDE],
    "512causal": [F(64, 128, 0, 512, 8, 1), *_WIDE[:3]],
    "512gqa": [F(64, 128, 0, 512, 8, 1), *_WIDE[:3]],
    "512one": [F(64, 128, 0, 512, 8, 1), *_WIDE[:3]],
    "320": [F(64, 64, 0, 512, 4, 2), *_WIDE[:3]],
    "384": [F(64, 64, 0, 512, 4, 1), *_WIDE[:3]],
    "256": [F(64, 128, 0, 512, 4, 1), *_WIDE[:3]],
    "256window": [F(64, 128, 0, 512, 4, 1), F(64, 64, 0, 512, 4, 1), F(128, 64, 0, 512, 8, 2)],
    "1024": [F(128, 128, 64, 256, 8, 4), *_WIDE[:4]],
    "640": [F(128, 128, 64, 256, 8, 4), *_WIDE[:3]],
    "128": [F(128, 128, 0, 512, 8, 2), F(64, 64, 0, 512, 4, 3), F(64, 64, 0, 512, 4, 2), F(64, 128, 0, 512, 4, 1)],
    "64": [F(64, 128, 0, 512, 4, 3), F(64, 128, 0, 512, 4, 2), F(64, 64, 0, 512, 4, 2), F(128, 128, 0, 512, 4, 1)],
}

_SCORES = [
    S(128, 128, 64, 4, 3), S(128, 128, 32, 4, 4), S(128, 128, 64, 8, 4), S(128, 256, 64, 8, 3),
]  # fmt: skip
_QUERY = [P(128, 320, 64, 8, 4), P(128, 320, 64, 8, 3)]
_KEY = [P(128, 320, 64, 8, 4), P(128, 320, 64, 8, 3)]
BASE = configs.BackwardConfig(_SCORES[0], _QUERY[0], _KEY[0], S(64, 64, 64, 4, 2))
BACKWARD = ["512", "512causal", "512gqa", "320", "256", "256window", "1024", "640", "128"]
SWEPT = ["512", "1024"]  # where every stage of the backward is tried in several tiles; elsewhere the best of "512"


def tensors(case: Case) -> AttentionInputs:
    def draw(heads: int):
        return torch.randn(case.batch, heads, case.length, case.head_dim, device="cuda", dtype=BF16)

    inputs = AttentionInputs(
        draw(case.heads), draw(case.kv_heads), draw(case.kv_heads), scale=case.head_dim**-0.5,
        is_causal=case.mask == "causal",
    )  # fmt: skip
    if case.mask == "window":
        inputs = with_intervals(inputs, RowIntervals.sliding_window(case.length, case.length, 1024, "cuda"))
    return inputs


def with_intervals(inputs: AttentionInputs, intervals: RowIntervals) -> AttentionInputs:
    first, last = intervals.query_ranges(inputs.key.shape[2])
    return replace(
        inputs, row_start=intervals.start, row_end=intervals.end, key_mask=intervals.key_mask, block_start=first,
        block_end=last,
    )  # fmt: skip


def median_ms(run, seconds: float = 0.35) -> float:
    run()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    times = []
    for _ in range(max(3, min(40, int(1000 * seconds / max(begin.elapsed_time(end), 0.01))))):
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


class Choice:
    """Make the launcher use one configuration."""

    def __init__(self, forward=None, backward=None):
        self.forward, self.backward = forward, backward

    def __enter__(self):
        self.saved = configs.choose_forward, configs.choose_wide, configs.choose_backward
        if self.forward is not None:
            wide = isinstance(self.forward, W)
            configs.choose_wide = lambda *_: self.forward if wide else None
            configs.choose_forward = lambda *_: self.forward
        if self.backward is not None:
            configs.choose_backward = lambda *_: self.backward

    def __exit__(self, *_):
        configs.choose_forward, configs.choose_wide, configs.choose_backward = self.saved


# --- correctness ---------------------------------------------------------------------------------------------------


def checks():
    """(name, inputs): small calls of every feature, and a few long ones."""

    def make(head_dim, heads=4, kv_heads=2, q_len=320, kv_len=450, dtype=BF16, batch=2, **fields):
        fields.setdefault("scale", head_dim**-0.5)

        def draw(n, length):
            return torch.randn(batch, n, length, head_dim, device="cuda", dtype=dtype)

        return AttentionInputs(draw(heads, q_len), draw(kv_heads, kv_len), draw(kv_heads, kv_len), **fields)

    def randn(*shape):
        return torch.randn(*shape, device="cuda")

    rng = torch.tensor([2**40 + 3, 2**35 + 1], device="cuda")
    for head_dim in (64, 72, 128, 192, 256, 320, 384, 448, 512, 640, 1024):
        yield f"D{head_dim}", make(head_dim)
        yield f"D{head_dim} causal", make(head_dim, is_causal=True)
    long = {"heads": 4, "kv_heads": 2, "q_len": 3300, "kv_len": 3100, "batch": 1}  # long enough for the wide forward
    for head_dim in (320, 512, 1024):
        yield f"D{head_dim} wide", make(head_dim, **long)
    yield "D512 wide causal", make(512, **long, is_causal=True, sinks=randn(4))
    yield "D512 wide growing", make(512, **long, scale=0.2)
    yield "D512 wide dropout", make(512, **long, dropout_p=0.2, rng_state=rng)
    yield "D512 wide bias", replace(make(512, **long), bias=randn(1, 4, 1, 3100))
    window = RowIntervals.sliding_window(3300, 3100, 700, "cuda")
    yield "D384 wide window", with_intervals(make(384, **long), window)
    yield "D512 fp16", make(512, dtype=torch.float16, is_causal=True)
    for head_dim in (64, 320, 512):
        base = make(head_dim)
        mask = torch.rand(2, 1, 320, 450, device="cuda") > 0.3
        mask[:, :, 5] = False
        yield f"D{head_dim} mask", replace(base, mask=mask)
        yield f"D{head_dim} key mask", replace(base, mask=torch.rand(2, 1, 1, 450, device="cuda") > 0.3)
        yield f"D{head_dim} bias", replace(base, bias=randn(1, 4, 320, 450))
        yield f"D{head_dim} bias keys", replace(base, bias=randn(2, 1, 1, 450).to(BF16))
        yield f"D{head_dim} softcap sinks", replace(base, softcap=5.0, sinks=randn(4))
        yield f"D{head_dim} dropout", replace(base, dropout_p=0.2, rng_state=rng)
        window = RowIntervals.sliding_window(320, 450, 100, "cuda", lower_right=True)
        there = torch.rand(2, 450, device="cuda") > 0.2
        yield f"D{head_dim} window", with_intervals(base, RowIntervals(window.start, window.end, there))
    low = torch.zeros(2, 1, 320, 450, device="cuda")
    low[:, :, 3] = torch.finfo(torch.float32).min
    low[:, :, 4] = float("-inf")
    yield "D512 finite minima", replace(make(512), bias=low)
    one = torch.randn(1, 1, 450, 512, device="cuda", dtype=BF16).expand(2, 2, 450, 512)
    yield "D512 expanded", replace(make(512), key=one, value=one)
    fused = torch.randn(2, 333, 3, 4, 512, device="cuda", dtype=BF16)
    q, k, v = (fused[:, :, part].transpose(1, 2) for part in range(3))
    yield "D512 fused", AttentionInputs(q, k, v, scale=0.05, is_causal=True)
    yield "D512 long", make(512, heads=2, kv_heads=1, q_len=2048, kv_len=2048, batch=1, is_causal=True)
    yield "D256 short q", make(256, q_len=3, kv_len=2000)


def relative(have, want) -> float:
    if not torch.isfinite(have).all():
        return float("nan")
    return ((have.double() - want).norm() / want.norm().clamp(min=1e-30)).item()


def definition(inputs: AttentionInputs, grad_out, grad_lse, dtype):
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in
              (inputs.query, inputs.key, inputs.value, inputs.bias, inputs.sinks)]  # fmt: skip
    q, k, v, bias, sinks = leaves
    keep = None
    if inputs.rng_state is not None:
        keep = philox_keep_mask(inputs.rng_state, *q.shape[:3], k.shape[2], inputs.dropout_p)
    out, lse = reference.attention(
        q, k, v, scale=inputs.scale, is_causal=inputs.is_causal, mask=inputs.mask, bias=bias,
        row_start=inputs.row_start, row_end=inputs.row_end, key_mask=inputs.key_mask, sinks=sinks,
        softcap=inputs.softcap, keep=keep, dropout_p=inputs.dropout_p,
    )  # fmt: skip
    alive = lse > -torch.inf
    outputs = [out, torch.where(alive, lse, 0.0)]
    seeds = [grad_out.to(dtype), torch.where(alive, grad_lse.to(dtype), 0.0)]
    grads = torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], seeds)
    return [out.detach(), outputs[1].detach(), *grads]


def run_checks(results: list) -> bool:
    torch.use_deterministic_algorithms(True, warn_only=True)  # also fills empty memory with NaN
    bad = 0
    worst: dict[str, float] = {}
    for name, inputs in checks():
        torch.manual_seed(1)
        try:
            out, lse, stats = backend.forward(inputs, TritonBackend())
            grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
            needs = (True, True, True, inputs.bias is not None, inputs.sinks is not None)
            grads = backend.backward(inputs, out, lse, stats, grad_out, grad_lse, needs, TritonBackend())
            again = backend.backward(inputs, out, lse, stats, grad_out, grad_lse, needs, TritonBackend())
        except Exception as error:  # a config that does not compile is a result too
            print(f"FAIL {name}: {type(error).__name__} {str(error)[:200]}")
            results.append({"check": name, "failed": str(error)[:2000]})
            bad += 1
            continue
        same = all(a is None or torch.equal(a, b) for a, b in zip(grads, again, strict=True))
        want = definition(inputs, grad_out, grad_lse, torch.float64)
        eager = definition(inputs, grad_out, grad_lse, inputs.query.dtype if inputs.bias is None else torch.float32)
        lse = torch.where(lse > -torch.inf, lse, 0.0)
        have = [out, lse, *(g for g in grads if g is not None)]
        errors = [relative(a, b) for a, b in zip(have, want, strict=True)]
        floor = [relative(a, b) for a, b in zip(eager, want, strict=True)]
        limit = 1e-2 if inputs.query.dtype == BF16 else 2e-3
        failed = not same or any(not error < limit for error in errors)
        bad += failed
        results.append({"check": name, "errors": errors, "eager": floor, "deterministic": same, "failed": failed})
        worst[name] = max(errors)
        if failed:
            listed = " ".join(
                f"{error:.1e}/{eager_error:.1e}" for error, eager_error in zip(errors, floor, strict=True)
            )
            print(f"FAIL {name}: deterministic {same}; error/eager of out lse dq dk dv ...: {listed}")
    torch.use_deterministic_algorithms(False)
    print(f"checks: {len(results)} run, {bad} failed; worst error {max(worst.values(), default=0):.2e}")
    return bad == 0


# --- compile ahead ----------------------------------------------------------------------------------------------------


class _Warm:
    """Stands in for a kernel: compiles instead of launching."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.kernel.warmup(*args, grid=grid, **kwargs)


def jobs(only):
    """(case name, direction, config) of everything that is timed before a best is known."""
    for name, rows in FORWARD.items():
        for config in rows:
            if not only or f"fwd{name}" in only:
                yield name, "fwd", config
    for name in BACKWARD:
        if only and f"bwd{name}" not in only:
            continue
        for config in backward_rows(name):
            yield name, "bwd", config


def backward_rows(name):
    yield BASE
    if name in SWEPT:
        yield from (replace(BASE, scores=scores) for scores in _SCORES[1:])
        yield from (replace(BASE, query=query) for query in _QUERY[1:])
        yield from (replace(BASE, key=key) for key in _KEY[1:])


def precompile(only, index: int, count: int, checked: bool) -> None:
    launch.attention_forward = _Warm(launch.attention_forward)
    launch.forward_scores = _Warm(launch.forward_scores)
    launch.forward_product = _Warm(launch.forward_product)
    for kernel in ("row_delta", "backward_scores", "gradient_query", "gradient_key", "gradient_bias"):
        setattr(launch.device, kernel, _Warm(getattr(launch.device, kernel)))
    if checked:
        for _, inputs in list(checks())[index::count]:
            needs = (True, True, True, inputs.bias is not None, inputs.sinks is not None)
            with contextlib.suppress(Exception):
                out, lse, stats = backend.forward(inputs, TritonBackend())
                backend.backward(inputs, out, lse, stats, out, lse, needs, TritonBackend())
    work = list(jobs(only))
    for name, direction, config in work[index::count]:
        case = CASES[name]
        choice = Choice(config if direction == "fwd" else None, config if direction == "bwd" else None)
        with contextlib.suppress(Exception), choice:  # a failure is reported when it is timed
            inputs = tensors(case)
            if direction == "fwd":
                backend.forward(inputs, TritonBackend())
            else:
                lse = torch.empty(inputs.query.shape[:3], device="cuda")
                backend.backward(
                    inputs, inputs.query, lse, torch.empty(0, device="cuda"), inputs.query, None,
                    (True, True, True, False, False), TritonBackend(),
                )  # fmt: skip


# --- timing -----------------------------------------------------------------------------------------------------------


def stage_times(run) -> dict[str, float]:
    """Milliseconds of each kernel of one backward call, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        run()
        torch.cuda.synchronize()
    return {row.key: round(row.device_time_total / 1000, 3) for row in watched.key_averages() if row.device_time_total}


def sdpa_row(name: str, case: Case, inputs: AttentionInputs) -> dict:
    """F.sdpa on the same tensors, to compare with; it has no windows."""
    key, value = (tensor.repeat_interleave(inputs.group, 1) for tensor in (inputs.key, inputs.value))
    call = torch.nn.functional.scaled_dot_product_attention
    ms = median_ms(lambda: call(inputs.query, key, value, is_causal=inputs.is_causal), 0.2)
    print(f"fwd {name:9s} {ms:8.2f} ms {case.flops('fwd') / ms / 1e9:5.0f} TF  F.sdpa", flush=True)
    return {"case": name, "direction": "fwd", "config": "F.sdpa", "ms": ms, "tflops": case.flops("fwd") / ms / 1e9}


def time_case(name: str, case: Case, wanted: list, best: dict, deadline: float, with_sdpa: bool) -> list[dict]:
    """Rows of one shape. `best` holds the best backward parts found so far, which shapes outside SWEPT take over."""
    torch.manual_seed(0)
    inputs = tensors(case)
    needs = (True, True, True, False, False)
    config = TritonBackend()
    rows = [sdpa_row(name, case, inputs)] if with_sdpa and case.mask != "window" else []
    table = []
    out, lse, stats = backend.forward(inputs, config)
    grad_out = torch.randn_like(out)

    def run_forward():
        return backend.forward(inputs, config)

    def run_backward():
        return backend.backward(inputs, out, lse, stats, grad_out, None, needs, config)

    for _, direction, tiles in wanted:
        if time.time() > deadline:
            break
        backward = direction == "bwd"
        if backward and name not in SWEPT and "512" in best:
            tiles = best["512"]
        row = {"case": name, "direction": direction, "config": asdict(tiles)}
        rows.append(row)
        try:
            with Choice(None if backward else tiles, tiles if backward else None):
                ms = median_ms(run_backward if backward else run_forward)
                stages = stage_times(run_backward if backward else run_forward)
        except Exception as error:
            row["failed"] = str(error)[:500]
            print(f"{direction} {name:9s} failed: {str(error)[:90]!r} {short(tiles)}", flush=True)
            torch.cuda.synchronize()
            continue
        row.update(ms=ms, tflops=case.flops(direction) / ms / 1e9, kernels_ms=stages)
        if backward:
            table.append((tiles, stages))
        listed = " ".join(f"{key.split('_')[-1][:6]}={value:.1f}" for key, value in stages.items() if value > 0.05)
        print(f"{direction} {name:9s} {ms:8.2f} ms {row['tflops']:5.0f} TF  {short(tiles)} {listed}", flush=True)
    if name in SWEPT and table:
        best[name] = combine(table)
        print(f"    best backward parts for {name}: {short(best[name])}")
        with Choice(backward=best[name]):
            ms = median_ms(run_backward)
        rows.append({"case": name, "direction": "bwd", "config": asdict(best[name]), "ms": ms,
                     "tflops": case.flops("bwd") / ms / 1e9})  # fmt: skip
        print(f"bwd {name:9s} {ms:8.2f} ms {rows[-1]['tflops']:5.0f} TF  together", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--only", default="")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=420.0, help="start nothing new after this long")
    parser.add_argument("--precompile", default="")
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    if options.precompile:
        precompile(only, *map(int, options.precompile.split("/")), not options.skip_checks)
        return 0
    started = time.time()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, *sys.argv, flush=True)
    command = [sys.executable, __file__, "--only", options.only, *(["--skip-checks"] if options.skip_checks else [])]
    workers = [
        subprocess.Popen([*command, "--precompile", f"{index}/{options.workers}"]) for index in range(options.workers)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled ahead after {time.time() - started:.0f} s", flush=True)
    results: list = []
    good = options.skip_checks or run_checks(results)

    rows: list = []
    best: dict[str, configs.BackwardConfig] = {}
    deadline = started + options.seconds
    for name, case in CASES.items():
        wanted = [row for row in jobs(only) if row[0] == name]
        if wanted and time.time() < deadline:
            rows += time_case(name, case, wanted, best, deadline, options.peers)
            torch.cuda.empty_cache()
    payload = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]},
        "checks": results,
        "rows": rows,
    }
    Path(options.out, "triton_tiles.json").write_text(json.dumps(payload, indent=1))
    print(f"done after {time.time() - started:.0f} s")
    return 0 if good else 1


def combine(table) -> configs.BackwardConfig:
    """The best tile of each stage, stage by stage, as the profiler saw it."""

    def stage(kernel: str, part: str):
        return getattr(min(table, key=lambda row: row[1].get(kernel, 1e9))[0], part)

    return configs.BackwardConfig(
        stage("backward_scores", "scores"), stage("gradient_query", "query"), stage("gradient_key", "key"), BASE.bias
    )


def short(config) -> str:
    if isinstance(config, (configs.BackwardConfig, W)):
        parts = (config.scores, config.product) if isinstance(config, W) else (config.scores, config.query, config.key)
        return " ".join("/".join(str(value) for value in asdict(part).values()) for part in parts)
    return "/".join(str(value) for value in asdict(config).values())


if __name__ == "__main__":
    sys.exit(main())
