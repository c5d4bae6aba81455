"""The clock that tuner and benchmark share: device time of a call, behind a short wait that hides the host's part.

Knows no kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_CYCLES_PER_MS = 2_000_000
_MOST_WAIT_MS = 40.0
#: Calls shorter than this are timed several at a time.
_SHORT_MS = 0.5
_MOST_CALLS = 20


def milliseconds(run: Callable[[], object], device: torch.device, host_ms: float = 0.0) -> float:
    """Time of one `run` on `device`. host_ms: what queueing it takes the host, which then does not count."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    wait = min(_MOST_WAIT_MS, 1.5 * host_ms + 0.1)
    torch.cuda._sleep(int(wait * _CYCLES_PER_MS))  # the host queues everything meanwhile
    start.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)


def host_milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """How long the host takes to queue one `run`; 0 on a CPU, where that is the run itself."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    taken = (time.perf_counter() - begin) * 1e3
    torch.cuda.synchronize(device)
    return taken


class Sampler:
    """A call that has run before, ready to be sampled. estimate: its first time in ms."""

    def __init__(self, run: Callable[[], object], device: torch.device) -> None:
        self.device = device
        self._once = run
        host_ms = host_milliseconds(run, device)
        self.estimate = milliseconds(run, device, host_ms)
        self._calls = max(1, min(_MOST_CALLS, round(_SHORT_MS / max(self.estimate, 1e-4))))
        self._host_ms = host_ms * self._calls

    def sample(self) -> float:
        """Milliseconds of one call."""
        return milliseconds(self._several, self.device, self._host_ms) / self._calls

    def _several(self) -> None:
        for _ in range(self._calls):
            self._once()

    def round_ms(self) -> float:
        """What one sample takes."""
        return self.estimate * self._calls


def medians(samplers: list[Sampler], seconds: float, *, fewest: int = 3, most: int = 15) -> list[float]:
    """Median ms of each, sampled in turn so that clocks and temperature are the same for all; about `seconds` in all.

    Where one round alone takes longer than `seconds`, the estimates count as a sample and one round is added.
    """
    per_round = sum(sampler.round_ms() for sampler in samplers) / 1e3
    rounds = int(seconds / per_round) if per_round > 0 else most
    samples = [[sampler.estimate] if rounds < fewest else [] for sampler in samplers]
    for _ in range(max(1, min(most, rounds))):
        for sampler, found in zip(samplers, samples, strict=True):
            found.append(sampler.sample())
    return [statistics.median(found) for found in samples]
