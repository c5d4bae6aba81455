"""The sweep: many shapes in a few minutes, F.sdpa beside our routes, for auto's table and for the proof that it holds.

Leaner than `runner`: a result is compared with SDPA's, not with float64, and each time takes a tenth of a second.
Short calls are captured in CUDA graphs, all routes alike, so that launches do not count.
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ffpa_hf import settings
from ffpa_hf.bench.cases import Case, Direction
from ffpa_hf.bench.results import Results, Row
from ffpa_hf.bench.runner import Data, make_data
from ffpa_hf.functional import explain, ffpa_attn_func
from ffpa_hf.kernels.tuning import clock
from ffpa_hf.kernels.tuning.preferences import NOISE
from ffpa_hf.masks import RowIntervals

DIRECTIONS: tuple[Direction, ...] = ("fwd", "fwd+bwd")
#: Calls shorter than this are launch-bound: timed in a CUDA graph, listed apart.
LAUNCH_BOUND_MS = 0.05
_GRAPH_CALLS = 8
#: Largest relative difference of two bf16 results of the same call.
_TOLERANCE = 3e-2
_CAPTURED = "in a CUDA graph"

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
#: (what to say of it, the call)
Variant = tuple[str, Call]


# --- masks and calls --------------------------------------------------------------------------------------------------


def _intervals(case: Case, device: torch.device) -> RowIntervals | None:
    if case.window is not None:
        return RowIntervals.sliding_window(case.q_len, case.kv_len, case.window, device)
    if case.form != "padded":
        return None
    rows = RowIntervals.causal_lower_right(case.q_len, case.kv_len, device)
    there = torch.arange(case.kv_len, device=device) % 8 != 7
    return RowIntervals(rows.start, rows.end, key_mask=there[None])


def _mask_tensors(case: Case, device: torch.device) -> dict[str, Tensor | None]:
    """The masks that F.sdpa takes for a case, by name; one None where it needs no tensor."""
    intervals = _intervals(case, device)
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator(device).manual_seed(1)
    if case.form == "additive":
        return {"": torch.randn(1, 1, case.q_len, case.kv_len, generator=generator, device=device, dtype=dtype)}
    if intervals is not None:
        keep = intervals.dense(case.kv_len)
    elif case.form == "bool":
        keep = torch.rand(1, 1, case.q_len, case.kv_len, generator=generator, device=device) > 0.1
    else:
        return {"": None}
    added = torch.zeros(keep.shape, dtype=dtype, device=device).masked_fill_(~keep, float("-inf"))
    return {"bool mask": keep, "additive mask": added}


def _sdpa_variants(case: Case, device: torch.device) -> list[Variant]:
    """A plain call of F.sdpa in every legal form: bool or additive mask, K/V grouped or expanded."""

    def variant(mask: Tensor | None, grouped: bool) -> Call:
        expand = case.group > 1 and not grouped
        causal = case.causal and mask is None

        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if expand:
                key, value = key.repeat_interleave(case.group, 1), value.repeat_interleave(case.group, 1)
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
            )

        return call

    groups = {"": False} if case.group == 1 else {"expanded K/V": False}
    if case.group > 1 and case.head_dim <= 256:  # above, only the kernel that holds all scores takes groups
        groups["enable_gqa"] = True
    return [
        (", ".join(word for word in (mask_name, group_name) if word), variant(mask, grouped))
        for mask_name, mask in _mask_tensors(case, device).items()
        for group_name, grouped in groups.items()
    ]


def _our_variant(case: Case, device: torch.device, backend: str | None) -> Variant:
    """(the backends that run, the call) of ffpa_attn_func. A kernel that is named runs whatever its length."""
    forced = {"force_no_sdpa_fallback": True, "allow_unqualified": True} if backend not in (None, "sdpa") else {}
    more: dict[str, Any] = {"enable_gqa": case.group > 1, "backend": backend}
    intervals = _intervals(case, device)
    if intervals is not None:
        more["attn_mask"] = intervals
    elif case.form != "plain":
        more["attn_mask"] = next(iter(_mask_tensors(case, device).values()))
    else:
        more["is_causal"] = case.causal

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        with settings.override(**forced) if forced else contextlib.nullcontext():
            return ffpa_attn_func(query, key, value, **more)

    dtype = getattr(torch, case.dtype)
    query = torch.empty(1, dtype=dtype, device=device).expand(case.batch, case.heads, case.q_len, case.head_dim)
    key = torch.empty(1, dtype=dtype, device=device).expand(case.batch, case.kv_heads, case.kv_len, case.head_dim)
    with settings.override(**forced):
        made = explain(query, key, key, **more)
    if made.error is not None:
        raise type(made.error)(*made.error.args)
    return f"{made.forward} / {made.backward or 'no backward'}", call


def variants(case: Case, device: torch.device, provider: str) -> list[Variant]:
    """The ways a provider ("sdpa", or "ffpa_hf/" and auto or a backend) may run a case; the fastest counts."""
    if provider == "sdpa":
        return _sdpa_variants(case, device)
    backend = provider.removeprefix("ffpa_hf/")
    return [_our_variant(case, device, None if backend == "auto" else backend)]


def providers_for_table(device: torch.device) -> tuple[str, ...]:
    """SDPA, our route to it, and each kernel that is built and may run on a device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = torch.empty(1, dtype=dtype, device=device).expand(1, 1, 1024, 64)
    kernels = [c.backend for c in explain(query, query, query).candidates if c.accepted and c.backend != "sdpa"]
    return ("sdpa", "ffpa_hf/sdpa", *(f"ffpa_hf/{name}" for name in reversed(kernels)))


PROVIDERS_FOR_CHECK: tuple[str, ...] = ("sdpa", "ffpa_hf/auto")


def _differs_from_sdpa(case: Case) -> bool:
    """Whether our route to F.sdpa does more than call it."""
    return case.mask not in ("none", "causal") or case.group > 1


# --- one case ---------------------------------------------------------------------------------------------------------


def _runs(direction: Direction, call: Call, data: Data) -> Callable[[], None]:
    """One call on each K/V set of a case."""

    def forward() -> None:
        with torch.no_grad():
            for key, value in data.pairs:
                call(data.query, key, value)

    def both() -> None:
        for key, value in data.pairs:
            torch.autograd.grad(call(data.query, key, value), (data.query, key, value), data.grad_out)

    return forward if direction == "fwd" else both


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    """Several runs in one CUDA graph, replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH_CALLS):
            run()
    return graph.replay


@dataclass
class _Entry:
    row: Row
    run: Callable[[], None]
    sampler: clock.Sampler
    calls: int
    out: Any = field(repr=False, default=None)


def _entry(
    case: Case, direction: Direction, provider: str, ways: Sequence[Variant], data: Data, device: torch.device
) -> _Entry:
    """The fastest variant of a provider, ready to be sampled. Raises what the last one raised where none runs."""
    best: _Entry | None = None
    problem: Exception | None = None
    for note, call in ways:
        try:
            run = _runs(direction, call, data)
            run()  # compiles
            sampler = clock.Sampler(run, device)
        except Exception as error:
            problem = error.with_traceback(None)
            continue
        if best is None or sampler.estimate < best.sampler.estimate:
            best = _Entry(Row(case.id, direction, provider, note=note), run, sampler, len(data.pairs), call)
    if best is None:
        raise problem or RuntimeError("nothing to run")
    with torch.no_grad():
        best.out = best.out(data.query, *data.pairs[0])
    return best


def run_case(
    case: Case,
    providers: Sequence[str],
    device: torch.device,
    *,
    directions: Sequence[Direction] = DIRECTIONS,
    seconds: float = 0.1,
) -> list[Row]:
    """Time some providers on a case; a row for each direction and provider, whatever happens.

    seconds: sampling time per direction and provider. A provider whose output is not SDPA's gets a note and no time.
    """
    data = make_data(case, device)
    wanted = [name for name in providers if name != "ffpa_hf/sdpa" or _differs_from_sdpa(case)]
    ways: dict[str, list[Variant] | Exception] = {}
    for provider in wanted:
        try:
            ways[provider] = variants(case, device, provider)
        except Exception as problem:
            ways[provider] = problem
    rows: list[Row] = []
    for direction in directions:
        entries: list[_Entry] = []
        expected: Tensor | None = None
        for provider in wanted:
            row = Row(case.id, direction, provider)
            try:
                way = ways[provider]
                if isinstance(way, Exception):
                    raise way
                entry = _entry(case, direction, provider, way, data, device)
                row = entry.row
                expected = entry.out if expected is None else expected
                difference = float((entry.out.float() - expected.float()).norm() / expected.float().norm())
                if not difference < _TOLERANCE:
                    row.note += f"; differs from {wanted[0]} by {difference:.1e}"
                else:
                    entries.append(entry)
                entry.out = None
            except Exception as problem:
                text = (str(problem).strip().splitlines() or [""])[0]
                row.note = f"failed: {type(problem).__name__}: {text}"[:300]
            rows.append(row)
        _sample(entries, device, seconds)
        _compare(case, direction, [row for row in rows if row.direction == direction])
    return rows


def _sample(entries: list[_Entry], device: torch.device, seconds: float) -> None:
    """Fill in the rows' times; from CUDA graphs for all where one is so short that launches would count."""
    if device.type == "cuda" and any(e.sampler.estimate / e.calls < LAUNCH_BOUND_MS for e in entries):
        graphs = []
        with contextlib.suppress(Exception):
            for entry in entries:
                replay = _captured(entry.run)
                replay()
                graphs.append((replay, clock.Sampler(replay, device)))
        if len(graphs) == len(entries):
            for entry, (replay, sampler) in zip(entries, graphs, strict=True):
                entry.run, entry.sampler, entry.calls = replay, sampler, entry.calls * _GRAPH_CALLS
                entry.row.note = ", ".join(word for word in (entry.row.note, _CAPTURED) if word)
    times = clock.medians([entry.sampler for entry in entries], seconds * len(entries)) if entries else []
    for entry, ms in zip(entries, times, strict=True):
        entry.row.ms = ms / entry.calls


def _compare(case: Case, direction: Direction, block: list[Row]) -> None:
    base = next((row.ms for row in block if row.provider == "sdpa"), None)
    for row in block:
        if row.ms is not None:
            row.tflops = case.flops(direction) / row.ms / 1e9
            row.speedup_vs_sdpa = None if base is None else base / row.ms


# --- many cases -------------------------------------------------------------------------------------------------------


def run(
    cases: Sequence[Case],
    providers: Sequence[str],
    results: Results,
    device: torch.device,
    *,
    seconds: float = 0.1,
    minutes: float | None = None,
    on_step: Callable[[str], None] = lambda text: None,
    on_case: Callable[[], None] = lambda: None,
) -> list[Case]:
    """Time every case into `results`; returns those that were not begun because `minutes` were over.

    Where auto is among the providers, a case in which it loses is timed once more, four times as long, and that counts.
    """
    begin = time.monotonic()
    for index, case in enumerate(cases):
        if minutes is not None and time.monotonic() - begin > minutes * 60:
            return list(cases[index:])
        on_step(case.id)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why F.sdpa's kernels refuse, at length
            try:
                rows = run_case(case, providers, device, seconds=seconds)
                if losers(rows):
                    rows = run_case(case, providers, device, seconds=4 * seconds)
            except Exception as problem:  # the inputs do not fit
                note = f"not run: {type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"[:300]
                rows = [Row(case.id, way, name, note=note) for way in DIRECTIONS for name in providers]
        results.rows += rows
        if device.type == "cuda" and index % 8 == 7:
            gc.collect()
            torch.cuda.empty_cache()
        on_case()
    return []


def losers(rows: Iterable[Row], provider: str = "ffpa_hf/auto") -> list[Row]:
    """The rows of a provider that are more than the noise slower than SDPA, or have no time beside SDPA's."""
    rows = list(rows)
    timed = {(row.case, row.direction) for row in rows if row.provider == "sdpa" and row.ms is not None}
    return [
        row
        for row in rows
        if row.provider == provider
        and (row.case, row.direction) in timed
        and (row.speedup_vs_sdpa is None or row.speedup_vs_sdpa < 1.0 / NOISE)
    ]


def is_launch_bound(row: Row) -> bool:
    """Whether a row was timed in a CUDA graph, because launches would have counted."""
    return row.note.endswith(_CAPTURED)


def warm(cases: Sequence[Case], provider: str, device_name: str, index: int, count: int) -> int:
    """Run a share of the cases once, so that the compiled kernels are on disk; for worker processes. Returns how many.

    Cases that need the same kernels go to the same worker.
    """
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kinds = sorted({_kind(case) for case in cases})
    mine = {kind for place, kind in enumerate(kinds) if place % count == index}
    ran = 0
    for case in cases:
        if _kind(case) in mine:
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                data = make_data(case, device)
                for _, call in variants(case, device, provider):
                    _runs("fwd+bwd", call, data)()
                ran += 1
    return ran


def _kind(case: Case) -> tuple[int, str, bool, bool]:
    return case.head_dim, case.mask, case.group > 1, case.q_len < 16


def table(results: Results, *, chosen: str = "ffpa_hf/auto") -> Any:
    """The rows as a rich table: one line per case and direction, a column for each provider."""
    from rich.table import Table

    names = list(dict.fromkeys(row.provider for row in results.rows))
    view = Table(title=f"{results.device}, {results.date}; ms (times SDPA's speed)", title_justify="left")
    view.add_column("case", overflow="fold")
    view.add_column("dir")
    for name in names:
        view.add_column(name, justify="right")
    view.add_column("note", overflow="fold")
    blocks: dict[tuple[str, str], dict[str, Row]] = {}
    for row in results.rows:
        blocks.setdefault((row.case, row.direction), {})[row.provider] = row
    for (case, direction), found in blocks.items():
        cells = []
        for name in names:
            timed = found.get(name, Row(case, direction, name))
            text = "-" if timed.ms is None else f"{timed.ms:.4f}"
            if timed.speedup_vs_sdpa is not None and name != "sdpa":
                text += f" ({timed.speedup_vs_sdpa:.2f})"
            cells.append(text)
        notes = [row.note for row in found.values() if row.ms is None or row.provider == chosen]
        view.add_row(case, direction, *cells, "; ".join(dict.fromkeys(note for note in notes if note)))
    return view
