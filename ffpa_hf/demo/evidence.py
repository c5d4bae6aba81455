"""What the demo collects: checks with their limits, and attention call sites with their times.

Knows nothing of pictures, text or pages, and asks `ffpa_hf.report` what served a call instead of guessing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import Module

from ffpa_hf.report import report


@dataclass(frozen=True)
class Check:
    """One question that the demo answers with a measured number.

    measured and allowed are the two sides of the comparison, as text with units; why says where the limit comes from.
    """

    name: str
    passed: bool
    measured: str
    allowed: str
    why: str


@dataclass(frozen=True)
class Site:
    """One attention module: what it was given, who served it and why, and what a forward of the module takes.

    default_ms and ffpa_ms: median milliseconds of the whole module (projections and attention) in the run without and
    with ffpa_hf.
    """

    part: str
    module: str
    shape: str
    backend: str
    backward: str
    reason: str
    calls: int
    default_ms: float
    ffpa_ms: float


class SiteClock:
    """Times every forward of the given modules while it is open; CUDA events on a GPU, the wall clock elsewhere."""

    def __init__(self, modules: Iterable[tuple[str, Module]], device: torch.device) -> None:
        self._modules = list(modules)
        self._cuda = device.type == "cuda"
        self._starts: dict[str, torch.cuda.Event | float] = {}
        self._spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event] | float]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> SiteClock:
        for name, module in self._modules:
            self._spans[name] = []
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._start(name)))
            self._hooks.append(module.register_forward_hook(lambda *_, name=name: self._stop(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._cuda:
            torch.cuda.synchronize()

    def _now(self) -> torch.cuda.Event | float:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _start(self, name: str) -> None:
        self._starts[name] = self._now()

    def _stop(self, name: str) -> None:
        start, stop = self._starts.pop(name), self._now()
        if isinstance(start, float) and isinstance(stop, float):
            self._spans[name].append((stop - start) * 1e3)
        else:
            self._spans[name].append((start, stop))  # type: ignore[arg-type]

    def calls(self, name: str) -> int:
        """Forwards of the module seen while the clock was open."""
        return len(self._spans[name])

    def median_ms(self, name: str) -> float:
        """Median milliseconds of one forward of the module; read it after the clock is closed."""
        spans = self._spans[name]
        times = [span if isinstance(span, float) else span[0].elapsed_time(span[1]) for span in spans]
        return statistics.median(times)


def sites_of(part: str, model: Module, default: SiteClock, ffpa: SiteClock) -> list[Site]:
    """The rows of `ffpa_hf.report(model)` with the times of both runs beside them."""
    return [
        Site(
            part=part,
            module=row.module_name,
            shape=row.shape,
            backend=row.backend,
            backward=row.backward,
            reason=row.reason,
            calls=row.calls,
            default_ms=default.median_ms(row.module_name),
            ffpa_ms=ffpa.median_ms(row.module_name),
        )
        for row in report(model)
        if row.calls
    ]


def every_call_counted(part: str, model: Module, names: Iterable[str], clock: SiteClock) -> Check:
    """Whether each attention forward of the ffpa_hf run went through it: equal numbers prove nothing otherwise."""
    counted: dict[str, int] = {}
    for row in report(model):
        counted[row.module_name] = counted.get(row.module_name, 0) + row.calls
    names = list(names)
    missed = [name for name in names if counted.get(name, 0) < clock.calls(name) or not clock.calls(name)]
    seen, made = sum(counted.get(name, 0) for name in names), sum(clock.calls(name) for name in names)
    return Check(
        name=f"{part}: every attention call went through ffpa_hf",
        passed=not missed,
        measured=f"{seen} calls in {len(names)} modules" + (f"; not {', '.join(missed[:4])}" if missed else ""),
        allowed=f"{made} calls",
        why="two runs of the same untouched code would agree as well, so the calls are counted",
    )
