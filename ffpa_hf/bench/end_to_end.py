"""`ffpa-hf bench --e2e`: whole models at real dimensions, with their own attention and with ours, in one process.

Each case is judged before it is timed: against the same weights in float32 (float64 for float32 models), a result may
be at most twice as far off as the one with "sdpa". Times include everything, launch gaps too; peak memory includes the
weights.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import ffpa_hf
from ffpa_hf.bench import jobs, profile
from ffpa_hf.bench.jobs import Direction, Job
from ffpa_hf.bench.models import MODELS
from ffpa_hf.bench.results import Results, Row
from ffpa_hf.bench.runner import collect, copy_tb_s, matmul_tflops, noted
from ffpa_hf.report import reset

#: A result may be this many times as far from the exact one as that of "sdpa" ...
TIMES_SDPA_ERROR = 2.0
#: ... plus this: one number such as a loss may be closer to the exact one than its precision by chance.
ERROR_FLOOR = {torch.bfloat16: 1e-3, torch.float32: 1e-5}
#: What attention in 8 bits may add: its own error is 5% a layer, and layers add to what they are given.
_QUANTISED_FLOOR = 0.1
#: The dtype in which the same weights give the result to judge by.
_EXACT = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
_WRONG = "WRONG"
_ROUNDS = (3, 25)  # fewest and most samples of a provider

#: Providers, as for single calls: the model's own attention, ours by automatic choice, one of our backends preferred.
PROVIDERS = ("sdpa", "ffpa_hf/auto", "ffpa_hf/triton", "ffpa_hf/cuda", "ffpa_hf/cuda-fp8", "ffpa_hf/cute")
DEFAULT_PROVIDERS = ("sdpa", "ffpa_hf/auto")


@dataclass(frozen=True)
class ModelCase:
    """One job on one model of `MODELS`; the id is published, so a row is never changed once it has been measured."""

    id: str
    model: str
    text: str
    job: Callable[[Any, torch.device], Job]


def _step(*lengths: int, cu_seqlens: bool = False) -> Callable[[Any, torch.device], Job]:
    return lambda model, device: jobs.TrainStep(model, device, lengths, cu_seqlens)


_PACKED = (2048, 4096, 3072, 2560)

#: Cases that use the same model stand together: it is built once.
FULL: tuple[ModelCase, ...] = (
    ModelCase("gemma4_31b_6l_8k", "gemma4_31b_6l", "training step, 8192 tokens", _step(8192)),
    ModelCase("gemma4_31b_6l_16k", "gemma4_31b_6l", "training step, 16384 tokens", _step(16384)),
    ModelCase("gemma4_31b_6l_packed", "gemma4_31b_6l", f"training step, documents of {_PACKED}", _step(*_PACKED)),
    ModelCase(
        "gemma4_31b_6l_packed_cu",
        "gemma4_31b_6l",
        "the same with cu_seq_lens",
        _step(*_PACKED, cu_seqlens=True),
    ),
    ModelCase(
        "generate_8k", "gemma4_31b_6l", "8192 tokens of prompt, 64 new", lambda m, d: jobs.Generate(m, d, 8192, 64)
    ),
    ModelCase("vae_128", "vae", "decoding latents of 128 x 128", lambda m, d: jobs.decode(m, d, 128)),
    ModelCase("vae_256", "vae", "decoding latents of 256 x 256", lambda m, d: jobs.decode(m, d, 256)),
    ModelCase("flux_1024", "flux", "one pass, 4096 + 512 tokens", lambda m, d: jobs.flux(m, d, 64, 512)),
    ModelCase("flux_2048", "flux", "one pass, 16384 + 512 tokens", lambda m, d: jobs.flux(m, d, 128, 512)),
    ModelCase("wan_32k", "wan", "one pass, 32760 tokens", lambda m, d: jobs.wan(m, d, 21, 60, 104, 512)),
)

#: Their twins for any CPU: the tool's own test.
TINY: tuple[ModelCase, ...] = (
    ModelCase("gemma4_tiny", "gemma4_tiny", "training step, 96 tokens", _step(96)),
    ModelCase("gemma4_tiny_packed", "gemma4_tiny", "training step, three documents", _step(32, 40, 24)),
    ModelCase("gemma4_tiny_packed_cu", "gemma4_tiny", "the same with cu_seq_lens", _step(32, 40, 24, cu_seqlens=True)),
    ModelCase("generate_tiny", "gemma4_tiny", "40 tokens of prompt, 4 new", lambda m, d: jobs.Generate(m, d, 40, 4)),
    ModelCase("vae_tiny", "vae_tiny", "decoding latents of 12 x 12", lambda m, d: jobs.decode(m, d, 12)),
    ModelCase("flux_tiny", "flux_tiny", "one pass, 36 + 8 tokens", lambda m, d: jobs.flux(m, d, 6, 8)),
    ModelCase("wan_tiny", "wan_tiny", "one pass, 48 tokens", lambda m, d: jobs.wan(m, d, 3, 8, 8, 8)),
)

#: "e2e" is what runs on a GPU when nothing is named; wan_32k alone would take as long again.
SETS: dict[str, tuple[ModelCase, ...]] = {
    "e2e": tuple(case for case in FULL if case.id != "wan_32k"),
    "e2e_tiny": TINY,
}


def select(patterns: Iterable[str]) -> tuple[ModelCase, ...]:
    """Cases of the named sets, by id or by glob, each once and in table order; ValueError where nothing matches."""
    chosen: set[str] = set()
    for pattern in patterns:
        found = [case.id for case in SETS.get(pattern, ())]
        found = found or [case.id for case in (*FULL, *TINY) if fnmatch.fnmatchcase(case.id, pattern)]
        if not found:
            raise ValueError(f"cases={pattern!r} matches no case; use a set ({', '.join(SETS)}), an id or a glob.")
        chosen.update(found)
    return tuple(case for case in (*FULL, *TINY) if case.id in chosen)


def select_providers(names: Sequence[str]) -> tuple[str, ...]:
    """The providers named, in table order; ValueError for a name that is none."""
    for name in names:
        if name not in PROVIDERS:
            raise ValueError(f"providers={name!r} is unknown with --e2e; use {', '.join(PROVIDERS)}.")
    return tuple(name for name in PROVIDERS if name in (names or DEFAULT_PROVIDERS))


@contextlib.contextmanager
def attention_of(model: Any, provider: str) -> Iterator[None]:
    """The model's attention by `provider` inside the `with` block."""
    backend = provider.partition("/")[2]
    if not backend:
        yield
        return
    with ffpa_hf.enabled(model, backend=None if backend == "auto" else backend):
        yield


# --- one case ---------------------------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """One provider on its way through a case: its rows, one per direction, and its samples in milliseconds."""

    provider: str
    rows: dict[Direction, Row]
    errors: dict[str, float] = field(default_factory=dict)
    samples: dict[Direction, list[float]] = field(default_factory=dict)
    alive: bool = True

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Turn what the provider raises into the note of its rows; it then takes no further part."""
        first = next(iter(self.rows.values()))
        with noted(first):
            yield
            return
        self.alive = False
        for row in self.rows.values():
            row.note = first.note


def run_case(
    case: ModelCase,
    model: Any,
    providers: Sequence[str],
    device: torch.device,
    *,
    seconds: float = 6.0,
    on_step: Callable[[str], None] = lambda text: None,
) -> tuple[list[Row], dict[str, list[profile.Kernel]]]:
    """Judge and time every provider on a case: one row per direction and provider, and what the time went into.

    seconds: sampling time aimed at, shared by all providers. The second value maps "provider direction" to the kernels
    that took longest.
    """
    torch.manual_seed(0)
    job = case.job(model, device)
    entries = [_Entry(name, {way: Row(case.id, way, name) for way in job.directions}) for name in providers]
    _judge(job, model, entries, device, lambda text: on_step(f"{case.id}: {text}"))
    on_step(f"{case.id}: sampling")
    _sample(job, model, [entry for entry in entries if entry.alive], device, seconds)
    kernels: dict[str, list[profile.Kernel]] = {}
    for entry in entries:
        on_step(f"{case.id}: profile of {entry.provider}")
        if not entry.alive:
            continue
        try:
            with attention_of(model, entry.provider):
                _inspect(job, entry, kernels, device)
        except Exception as problem:  # the times stand
            for row in entry.rows.values():
                row.note += f"{'; ' if row.note else ''}no profile: {type(problem).__name__}: {problem}"[:200]
    _finish(job, entries)
    for parameter in model.parameters():
        parameter.grad = None
    return [entry.rows[way] for way in job.directions for entry in entries], kernels


def _judge(job: Job, model: Any, entries: list[_Entry], device: torch.device, on_step: Callable[[str], None]) -> None:
    dtype = next(model.parameters()).dtype
    on_step(f"the result in {str(_EXACT[dtype]).removeprefix('torch.')}")
    truth = None
    with contextlib.suppress(torch.OutOfMemoryError):  # then the rows say so, and are timed all the same
        with jobs.parameters_in(model, _EXACT[dtype]), _fast_products():
            truth = job.result(exact=True)
    collect(device)
    limits: dict[str, float] | None = None
    for entry in entries:
        on_step(f"the result of {entry.provider}")
        with entry.noting(), attention_of(model, entry.provider):
            reset()
            result = job.result()
            note = _served(model)
            if truth is None:
                note = f"not judged, the exact result does not fit{'; ' if note else ''}{note}"
            else:
                entry.errors = job.errors(result, truth)
            for row in entry.rows.values():
                row.relative_error = max(entry.errors.values(), default=None)
                row.note = note
            del result
        if entry.provider == "sdpa" and entry.alive:
            limits = {name: TIMES_SDPA_ERROR * error + ERROR_FLOOR[dtype] for name, error in entry.errors.items()}
        collect(device)
    for entry in entries:
        for name, error in entry.errors.items():
            limit = (limits or {}).get(name, math.inf)
            limit += _QUANTISED_FLOOR if entry.provider.endswith("-fp8") else 0.0
            if error > limit or not math.isfinite(error):
                for row in entry.rows.values():
                    row.note = f"{_WRONG}: {name} off by {error:.1e}, allowed {limit:.1e}; {row.note}"


def wrong(rows: Iterable[Row]) -> list[Row]:
    """The rows whose result differs from sdpa's by more than rounding."""
    return [row for row in rows if row.note.startswith(_WRONG)]


@contextlib.contextmanager
def _fast_products() -> Iterator[None]:
    """float32 products in TF32, three bits finer than bfloat16: plain float32 would take ten times as long."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _served(model: Any) -> str:
    """Which backends the calls of one result went to; nothing where ffpa_hf was not asked."""
    counted = {name: calls for name, calls in ffpa_hf.report(model).backends().items() if calls}
    return "calls: " + ", ".join(f"{calls} {name}" for name, calls in counted.items()) if counted else ""


def _sample(job: Job, model: Any, entries: list[_Entry], device: torch.device, seconds: float) -> None:
    """In turns, so that clocks and temperature are the same for all."""
    spent, rounds = 0.0, 0
    while rounds < _ROUNDS[1] and (rounds < _ROUNDS[0] or spent < seconds * 1e3):
        for entry in entries:
            if not entry.alive:
                continue
            with entry.noting(), attention_of(model, entry.provider):
                if not rounds:
                    for way in job.directions:
                        job.run(way)
                for way in job.directions:
                    entry.samples.setdefault(way, []).append(_milliseconds(job, way, device))
                    spent += entry.samples[way][-1]
        rounds += 1


def _milliseconds(job: Job, way: Direction, device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        job.run(way)
        return (time.perf_counter() - begin) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    job.run(way)
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)


def _peak_gb(job: Job, way: Direction, device: torch.device) -> float | None:
    """Most memory in use during one run, weights included, in 10^9 bytes; None where torch does not count."""
    if device.type != "cuda":
        return None
    collect(device)
    torch.cuda.reset_peak_memory_stats(device)
    job.run(way)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 1e9


def _inspect(job: Job, entry: _Entry, kernels: dict[str, list[profile.Kernel]], device: torch.device) -> None:
    """Peak memory, the share of attention, and the longest kernels, under "provider direction"."""
    attention: dict[Direction, float] = {}
    for way, row in entry.rows.items():
        row.peak_gb = _peak_gb(job, way, device)
        seen = profile.record(functools.partial(job.run, way), device)
        kernels[f"{entry.provider} {way}"] = seen.kernels
        attention[way] = seen.attention_ms
    for way, row in entry.rows.items():
        row.attention_ms = job.milliseconds(way, attention)


def _finish(job: Job, entries: list[_Entry]) -> None:
    for entry in entries:
        if not entry.alive:
            continue
        medians = {way: statistics.median(samples) for way, samples in entry.samples.items()}
        for way, row in entry.rows.items():
            row.ms = job.milliseconds(way, medians)
            count = job.tokens(way)
            row.tokens_per_s = None if count is None else count / row.ms * 1e3
    base = next((entry for entry in entries if entry.provider == "sdpa" and entry.alive), None)
    for entry in entries:
        for way, row in entry.rows.items():
            if row.ms is not None and base is not None:
                row.speedup_vs_sdpa = base.rows[way].ms / row.ms  # type: ignore[operator]


# --- all of them ------------------------------------------------------------------------------------------------------


def run(
    cases: Sequence[ModelCase],
    providers: Sequence[str],
    results: Results,
    device: torch.device,
    *,
    seconds: float = 6.0,
    minutes: float | None = None,
    on_step: Callable[[str], None] = lambda text: None,
    on_case: Callable[[], None] = lambda: None,
) -> tuple[list[ModelCase], dict[str, dict[str, list[profile.Kernel]]]]:
    """Every case into `results`; `on_case` is called after each. Returns the cases left and the profiles by case id.

    minutes: no case is begun later than this.
    """
    begin = time.monotonic()
    on_step("plain matrix products and copies")
    results.matmul_tflops, results.copy_tb_s = matmul_tflops(device), copy_tb_s(device)
    collect(device)
    built, model = "", None
    profiles: dict[str, dict[str, list[profile.Kernel]]] = {}
    for index, case in enumerate(cases):
        if minutes is not None and time.monotonic() - begin > minutes * 60:
            return list(cases[index:]), profiles
        try:
            if case.model != built:
                built, model = "", None  # before the next one, so that both never stand beside each other
                collect(device)
                on_step(f"{case.id}: building {MODELS[case.model].text}")
                model = MODELS[case.model].make(device)
                built = case.model
            rows, profiles[case.id] = run_case(case, model, providers, device, seconds=seconds, on_step=on_step)
            results.rows += rows
        except Exception as problem:  # the model or its exact result does not fit, or its library is missing
            note = f"not run: {type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"[:300]
            results.rows += [Row(case.id, "-", provider, note=note) for provider in providers]
        collect(device)
        on_case()
    return [], profiles
