"""Random legal calls on every kernel backend of a GPU, in chunks that can be resumed; the seeds are recorded.

    python scripts/random_calls.py --cases 20000 --workers 16 --output benchmarks/results/random-calls.json

A chunk is one backend, one dtype and one seed. Chunks that the output file holds for the same kernel sources are left
out, so the command can be given again until all are done. Exit code 1: a call was answered wrongly; 2: chunks are left.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import conftest  # noqa: E402, F401 - turns the interpreter on where there is no GPU
import torch  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from oracle import HAS_GPU, Served  # noqa: E402
from random_calls import check, legal_calls  # noqa: E402

from ffpa_hf.kernels import qualification  # noqa: E402
from ffpa_hf.kernels.tuning import store  # noqa: E402

WIDTHS = (64, 72, 128, 256, 320, 512) if HAS_GPU else (64, 72)


Chunk = tuple[str, str, int]  # backend, dtype, seed


def chunks(cases: int, size: int) -> list[Chunk]:
    """(backend, dtype, seed) of every chunk: the backends and dtypes by turns."""
    kinds = [(name, dtype) for dtype in ("bfloat16", "float16") for name in ("triton", "cuda")]
    if not HAS_GPU:
        kinds = [("triton", "float32")]
    return [(*kinds[index % len(kinds)], index // len(kinds)) for index in range(-(-cases // size))]


def run_chunk(name: str, dtype: str, number: int, cases: int) -> dict[str, Any]:
    """Run one chunk; {"cases", "failures": [what went wrong first]}."""
    backend = Served(name, getattr(torch, dtype))
    done = 0

    @seed(number)
    @settings(max_examples=cases, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(legal_calls((backend.dtype,), WIDTHS, longest=200 if HAS_GPU else 13, few=not HAS_GPU), st.integers(0, 2))
    def run(case: Any, which: int) -> None:
        nonlocal done
        tensors, call, expected = case
        if name == "cuda":  # which has neither
            tensors.pop("sinks", None)
            for keywords in (call, expected):
                keywords.pop("softcap", None)
        check(backend, case, forward_only=which > 0)
        done += 1

    failures = []
    try:
        run()
        if HAS_GPU:
            torch.cuda.synchronize()
    except Exception as fault:  # of any kind: it is what we look for
        failures.append(f"{type(fault).__name__}: {str(fault)[:500]}")
    return {"backend": name, "dtype": dtype, "seed": number, "cases": done, "failures": failures}


def finished(left: list[Chunk], size: int, end: float, workers: int) -> Iterator[dict[str, Any]]:
    """The rows of chunks as they come; takes from `left` what was begun, which is nothing after `end`. Several workers
    are processes of their own on one GPU, since most of a small call is the host's and the truth's time."""
    if workers == 1:
        while left and time.monotonic() < end:
            yield run_chunk(*left.pop(0), size)
        return
    spawn = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    with ProcessPoolExecutor(workers, spawn, torch.set_num_threads, (1,)) as pool:
        running = {}
        while running or left and time.monotonic() < end:
            while left and len(running) < workers and time.monotonic() < end:
                chunk = left.pop(0)
                running[pool.submit(run_chunk, *chunk, size)] = chunk
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                name, dtype, number = running.pop(done)
                problem = done.exception()
                if problem:  # a process died, and the pool with it: what ran beside it is to be run again, too
                    end = 0.0
                    yield {"backend": name, "dtype": dtype, "seed": number, "cases": 0, "failures": [repr(problem)]}
                else:
                    yield done.result()


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--chunk", type=int, default=200, help="calls of one seed")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no chunk after this time")
    parser.add_argument("--output", type=Path, required=True, help="results file, read first where it exists")
    given_ = parser.parse_args(arguments)
    head = {
        "device": torch.cuda.get_device_name() if HAS_GPU else "cpu, Triton's interpreter",
        "command": f"python scripts/random_calls.py --cases {given_.cases} --chunk {given_.chunk}",
        "versions": {"torch": torch.__version__, "triton": qualification.compiler_version("triton")},
        "sources": {family: qualification.source_hash(family) for family in ("triton", "cuda")},
        "chunk": given_.chunk,
    }
    rows = []
    if given_.output.exists():
        before = json.loads(given_.output.read_text(encoding="utf-8"))
        if all(before.get(name) == head[name] for name in ("device", "versions", "sources", "chunk")):
            rows = before["rows"]
    known = {(row["backend"], row["dtype"], row["seed"]) for row in rows if not row["failures"]}
    rows = [row for row in rows if not row["failures"]]
    end = time.monotonic() + given_.seconds
    left = [chunk for chunk in chunks(given_.cases, given_.chunk) if chunk not in known]
    print(f"{head['device']}: {len(left)} chunks of {given_.chunk} calls to run, {len(known)} known")
    for row in finished(left, given_.chunk, end, given_.workers):
        rows.append(row)
        if row["failures"]:
            print(f"{row['backend']} {row['dtype']} seed {row['seed']}: {row['failures'][0]}")
        store.write_json(given_.output, {**head, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "rows": rows})
    failed = sum(bool(row["failures"]) for row in rows)
    print(f"{sum(row['cases'] for row in rows)} calls right, {failed} chunks with a fault, {len(left)} chunks left")
    return 1 if failed else 2 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
