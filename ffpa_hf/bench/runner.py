"""How a case is timed: every provider warmed up, then sampled in turn, and judged against the float64 result.

GPU time is measured with events behind a short device-side wait, so that launch overhead on the host does not count. A
provider that fails becomes a row with a note; nothing it does ends the run.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ffpa_hf.bench import overhead, truth
from ffpa_hf.bench.cases import Case, Direction
from ffpa_hf.bench.providers import Call, Provider, Unavailable, select
from ffpa_hf.bench.results import Results, Row
from ffpa_hf.kernels.tuning import clock

_ROUNDS = (3, 25)  # fewest and most samples of a provider
_SHORT_MS = 0.5  # calls shorter than this are timed several at a time
_SLOW_MS = 50.0  # one look is enough to choose between variants of slower calls
_MOST_INNER = 20
_HOPELESS = 3.0  # a way through F.sdpa that takes this many times the best one's forward is not tried backward
_GRAPH_CALLS = 8  # calls captured per K/V set


# --- clocks -----------------------------------------------------------------------------------------------------------


class Step(Protocol):
    """Something to time. `prepare` is not timed and gives `run` what it consumes; `calls`: calls in one run."""

    calls: int

    def prepare(self, count: int) -> Any: ...
    def run(self, state: Any, count: int) -> None: ...


def milliseconds(step: Step, count: int, device: torch.device, host_ms: float = 0.0) -> float:
    """Time of one call of `step`, run `count` times back to back. host_ms: what queueing one takes the host."""
    state = step.prepare(count)
    taken = clock.milliseconds(lambda: step.run(state, count), device, host_ms * count)
    return taken / (count * step.calls)


def _host_ms(step: Step, device: torch.device) -> float:
    """How long the host takes to queue one run."""
    state = step.prepare(1)
    return clock.host_milliseconds(lambda: step.run(state, 1), device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- what is timed ----------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """The tensors of a case as one layout holds them, all `[B, H, N, D]` by shape; leaves of autograd."""

    query: Tensor
    pairs: list[tuple[Tensor, Tensor]]
    grad_out: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """query, and the first key and value."""
        return self.query, *self.pairs[0]


class Forward:
    """Inference: no graph is kept."""

    calls = 1

    def __init__(self, call: Call, data: Data) -> None:
        self.call, self.data = call, data

    def prepare(self, count: int) -> None:
        return None

    def run(self, state: None, count: int) -> None:
        pairs = self.data.pairs
        with torch.no_grad():
            for index in range(count):
                self.call(self.data.query, *pairs[index % len(pairs)])


class Replay:
    """Forward calls over all K/V sets in one CUDA graph, as a decoding loop would run them."""

    def __init__(self, call: Call, data: Data) -> None:
        self.calls = _GRAPH_CALLS * len(data.pairs)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for pair in data.pairs:
                call(data.query, *pair)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            for index in range(self.calls):
                call(data.query, *data.pairs[index % len(data.pairs)])

    def prepare(self, count: int) -> None:
        return None

    def run(self, state: None, count: int) -> None:
        for _ in range(count):
            self.graph.replay()


class Backward:
    """Gradients of query, key and value; the forward before it is not timed."""

    calls = 1

    def __init__(self, call: Call, data: Data) -> None:
        self.call, self.data = call, data

    def prepare(self, count: int) -> list[Tensor]:
        return [self.call(*self.data.leaves) for _ in range(count)]

    def run(self, state: list[Tensor], count: int) -> None:
        for out in state:
            torch.autograd.grad(out, self.data.leaves, self.data.grad_out)


class Both:
    """A forward and its backward."""

    calls = 1

    def __init__(self, call: Call, data: Data) -> None:
        self.call, self.data = call, data

    def prepare(self, count: int) -> None:
        return None

    def run(self, state: None, count: int) -> None:
        for _ in range(count):
            torch.autograd.grad(self.call(*self.data.leaves), self.data.leaves, self.data.grad_out)


def _step(case: Case, direction: Direction, call: Call, data: Data) -> Step:
    if direction == "fwd":
        return Replay(call, data) if case.graph and data.query.is_cuda else Forward(call, data)
    return Backward(call, data) if direction == "bwd" else Both(call, data)


def make_data(case: Case, device: torch.device) -> Data:
    """Normally distributed inputs, the same on every run and for every provider."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(case.id.encode()))
    dtype = getattr(torch, case.dtype)

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(
            case.batch, heads, length, case.head_dim, generator=generator, device=device, dtype=dtype
        ).requires_grad_()

    query = normal(case.heads, case.q_len)
    pairs = [(normal(case.kv_heads, case.kv_len), normal(case.kv_heads, case.kv_len)) for _ in range(case.kv_sets)]
    return Data(query, pairs, normal(case.heads, case.q_len).detach())


def _in_layout(data: Data, layout: str) -> Data:
    if layout == "BHND":
        return data

    def stored(tensor: Tensor) -> Tensor:
        moved = tensor.detach().transpose(1, 2).contiguous().transpose(1, 2)
        return moved.requires_grad_(tensor.requires_grad)

    return Data(stored(data.query), [(stored(k), stored(v)) for k, v in data.pairs], stored(data.grad_out))


# --- one case ---------------------------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """One provider, ready to be sampled."""

    row: Row
    step: Step
    count: int
    host_ms: float
    samples: list[float] = field(default_factory=list)
    hopeless: set[str] = field(default_factory=set)  # notes of variants far slower than this one


def run_case(
    case: Case,
    directions: Sequence[Direction],
    providers: Sequence[Provider],
    device: torch.device,
    *,
    seconds: float = 2.0,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Time every provider on a case. seconds: sampling time aimed at per direction, shared by all providers.

    One row per direction and provider, in that order, whatever happens.
    """
    on_step(f"{case.id}: float64 result")
    data = make_data(case, device)
    needs_grads = any(direction != "fwd" for direction in directions)
    query, key, value = (tensor.detach() for tensor in data.leaves)
    exact = truth.compute(case, query, key, value, data.grad_out if needs_grads else None)
    layouts: dict[str, Data] = {}
    for layout in sorted({provider.layout for provider in providers}):
        layouts[layout] = _in_layout(data, layout)
    rows: list[Row] = []
    hopeless: set[str] = set()
    for direction in directions:
        block: list[Row] = []
        entries: list[_Entry] = []
        for provider in providers:
            on_step(f"{case.id} {direction}: {provider.name}")
            row = Row(case.id, direction, provider.name)
            block.append(row)
            with noted(row):
                skipped = hopeless if provider.name == "sdpa" else set()
                entry = _make_entry(case, direction, provider, layouts[provider.layout], exact, row, device, skipped)
                entries.append(entry)
                if provider.name == "sdpa" and direction == "fwd":
                    hopeless = entry.hopeless
            collect(device)
        on_step(f"{case.id} {direction}: sampling")
        _sample(entries, device, seconds)
        _finish(case, direction, block, entries)
        rows += block
        entries.clear()
        collect(device)
    return rows


@contextlib.contextmanager
def noted(row: Row):
    """Turn whatever a provider raises into its row's note."""
    try:
        yield
    except Unavailable as reason:
        row.note = str(reason)
    except torch.OutOfMemoryError:
        row.note = "out of memory"
    except Exception as problem:
        first = (str(problem).strip().splitlines() or [""])[0]
        row.note = f"failed: {type(problem).__name__}: {first}"[:300]


def _make_entry(
    case: Case,
    direction: Direction,
    provider: Provider,
    data: Data,
    exact: truth.Truth,
    row: Row,
    device: torch.device,
    skipped: Collection[str] = (),
) -> _Entry:
    """The fastest variant of a provider, ready to be sampled. skipped: notes of variants that are not tried."""
    if direction not in provider.directions:
        raise Unavailable("has no backward")
    if case.graph and direction != "fwd":
        raise Unavailable("a captured case runs forward only")
    variants = [variant for variant in provider.variants(case, device) if variant.note not in skipped]
    estimates_of: dict[str, float] = {}
    best: tuple[float, str, Step, Call, float | None] | None = None
    problems: list[Exception] = []
    for variant in variants:
        try:
            before = _allocated(device)
            call: Any = variant.prepare()
            step: Any = _step(case, direction, call, data)
            step.run(step.prepare(1), 1)  # compiles
            peak = _peak_gb(step, data, before, device)
            estimates = [milliseconds(step, 1, device, 1.0)]
            while len(estimates) < 3 and estimates[0] * step.calls < _SLOW_MS:
                estimates.append(milliseconds(step, 1, device, 1.0))
            estimate = estimates_of[variant.note] = statistics.median(estimates)
        except Exception as problem:
            problems.append(problem.with_traceback(None))  # whose frames would hold the tensors
            step = call = None
            collect(device)
            continue
        if best is None or estimate < best[0]:
            best = (estimate, variant.note, step, call, peak)
        del step, call
        collect(device)
    if best is None:
        raise problems[0]
    estimate, note, step, call, row.peak_gb = best
    known = len(exact.slices) * case.group
    everything = case.batch * case.heads
    row.note = note if known == everything else f"{note}{'; ' if note else ''}error on {known} of {everything} heads"
    row.relative_error = _error(direction, call, data, exact)
    host_ms = _host_ms(step, device)
    count = max(1, min(_MOST_INNER, round(_SHORT_MS / max(estimate * step.calls, 1e-4))))
    hopeless = {way for way, taken in estimates_of.items() if taken > _HOPELESS * estimate}
    return _Entry(row, step, count, host_ms, [estimate], hopeless)


def _sample(entries: list[_Entry], device: torch.device, seconds: float) -> None:
    """Round robin, so that clocks and temperature are the same for all."""
    per_round = sum(entry.samples[0] * entry.step.calls * entry.count for entry in entries) / 1e3
    fewest, most = _ROUNDS
    rounds = max(fewest, min(most, round(seconds / per_round))) if per_round else fewest
    for entry in entries:
        entry.samples.clear()
    for _ in range(rounds):
        for entry in list(entries):
            with noted(entry.row):
                entry.samples.append(milliseconds(entry.step, entry.count, device, entry.host_ms))
                continue
            entries.remove(entry)  # failed: its note says how


def _finish(case: Case, direction: Direction, block: list[Row], entries: list[_Entry]) -> None:
    for entry in entries:
        entry.row.ms = statistics.median(entry.samples)
        entry.row.tflops = case.flops(direction) / entry.row.ms / 1e9
    base = next((row.ms for row in block if row.provider == "sdpa"), None)
    for row in block:
        if row.ms is not None and base is not None:
            row.speedup_vs_sdpa = base / row.ms


def _error(direction: Direction, call: Call, data: Data, exact: truth.Truth) -> float:
    if direction == "fwd":
        with torch.no_grad():
            return exact.forward_error(call(*data.leaves))
    out = call(*data.leaves)
    dq, dk, dv = torch.autograd.grad(out, data.leaves, data.grad_out)
    error = exact.backward_error((dq, dk, dv))
    return error if direction == "bwd" else max(error, exact.forward_error(out.detach()))


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak_gb(step: Step, data: Data, before: int, device: torch.device) -> float | None:
    """Inputs, outputs, masks and scratch of one call, in 10^9 bytes; None where torch does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step.run(step.prepare(1), 1)
    torch.cuda.synchronize(device)
    tensors = [data.query, *(tensor for pair in data.pairs for tensor in pair)]
    if not isinstance(step, (Forward, Replay)):
        tensors.append(data.grad_out)
    inputs = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return (torch.cuda.max_memory_allocated(device) - before + inputs) / 1e9


def collect(device: torch.device) -> None:
    """Give back the memory of whatever is no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(Exception):  # a device that a provider has wrecked fails again at its next use
            torch.cuda.empty_cache()


# --- the device -------------------------------------------------------------------------------------------------------


class _Repeat:
    calls = 1

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def prepare(self, count: int) -> None:
        return None

    def run(self, state: None, count: int) -> None:
        for _ in range(count):
            self.function()


def _best(function: Callable[[], Any], device: torch.device) -> float:
    step = _Repeat(function)
    for _ in range(3):
        step.run(None, 1)
    return statistics.median(milliseconds(step, 4, device) for _ in range(7))


def matmul_tflops(device: torch.device) -> float:
    """Median rate of a square bf16 product of normal numbers (fp32 and small on a CPU)."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / _best(lambda: torch.mm(a, b, out=out), device) / 1e9


def copy_tb_s(device: torch.device) -> float:
    """Median rate of a copy within the device's memory, bytes read plus written."""
    size = 1 << (30 if device.type == "cuda" else 22)
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2.0 * size / _best(lambda: target.copy_(source), device) / 1e9


#: Providers whose kernels are compiled when first called, and kept on disk where the next process finds them.
COMPILED = (
    "flex",
    "ffpa-attn/triton",
    "ffpa_hf/auto",
    "ffpa_hf/triton",
    "ffpa_hf/cuda",
    "ffpa_hf/cuda-fp8",
    "ffpa_hf/cute",
)


def warm(
    cases: Sequence[Case],
    directions: Sequence[Direction] | None,
    providers: Sequence[str],
    device_name: str,
    index: int,
    count: int,
) -> int:
    """Run a share of the cases once with the providers that compile, so that `run` finds the kernels on disk.

    For worker processes: number `index` of `count`. What fails here fails again where it is noted. Returns how many
    cases and providers ran.
    """
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    chosen = select([name for name in providers if name in COMPILED], device) if set(providers) & set(COMPILED) else ()
    pairs = [(case, provider) for case in cases if not case.host for provider in chosen]
    ran = 0
    for case, provider in pairs[index::count]:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = _in_layout(make_data(case, device), provider.layout)
            for variant in provider.variants(case, device):
                call = variant.prepare()
                for direction in directions or case.directions:
                    if direction in provider.directions:
                        step: Any = _step(case, direction, call, data)
                        step.run(step.prepare(1), 1)
            _wait(device)
            ran += 1
        collect(device)
    return ran


def run(
    cases: Sequence[Case],
    directions: Sequence[Direction] | None,
    providers: Sequence[Provider],
    results: Results,
    device: torch.device,
    *,
    seconds: float = 2.0,
    minutes: float | None = None,
    on_step: Callable[[str], None] = lambda text: None,
    on_case: Callable[[], None] = lambda: None,
) -> list[Case]:
    """Measure the device, then every case, into `results`; `on_case` is called after each, to keep what there is.

    directions: None takes each case's own. minutes: no case is begun later than this; those left are returned.
    """
    begin = time.monotonic()
    on_step("plain matrix products and copies")
    results.matmul_tflops, results.copy_tb_s = matmul_tflops(device), copy_tb_s(device)
    collect(device)
    for index, case in enumerate(cases):
        if minutes is not None and time.monotonic() - begin > minutes * 60:
            return list(cases[index:])
        wanted = tuple(directions or case.directions)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why F.sdpa's kernels refuse, at length; the rows say what ran
                if case.host:
                    leaves = make_data(case, device).leaves
                    results.rows += overhead.run_case(case, leaves, device, seconds=seconds, on_step=on_step)
                else:
                    results.rows += run_case(case, wanted, providers, device, seconds=seconds, on_step=on_step)
        except Exception as problem:  # the case itself: its inputs or its float64 result do not fit
            note = f"not run: {type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"[:300]
            results.rows += [Row(case.id, d, p.name, note=note) for d in wanted for p in providers]
        _wait_quietly(device)
        collect(device)
        on_case()
    return []


def _wait_quietly(device: torch.device) -> None:
    with contextlib.suppress(Exception):
        _wait(device)
