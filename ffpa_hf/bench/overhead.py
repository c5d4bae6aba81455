"""What a call costs the host: the kernel launches alone, and everything that `ffpa_attn_func` does around them.

A case whose `host` is set is timed here. No kernel is waited for while the clock runs, so that a launch-bound loop is
seen as a decoding loop would feel it. Knows nothing of tables.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ffpa_hf import settings
from ffpa_hf.bench.cases import Case
from ffpa_hf.bench.results import Row

_BATCH = 100  # calls between two waits for the device: fewer than its queue holds
_BATCHES = (5, 60)  # fewest and most

#: The row that the others are read against.
BARE = "bare launch"


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to be repeated."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.args, **self.keywords)


class _Recorder:
    """In a kernel's place: launches it and keeps the launch."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **keywords: Any) -> None:
            self.launches.append(Launch(self.kernel, grid, args, keywords))
            self.launches[-1]()

        return launch


def kernels() -> list[tuple[ModuleType, str]]:
    """Where the Triton launcher finds its kernels: (module, name); what only other kernels call may be among them."""
    from ffpa_hf.kernels.triton import launch

    modules = [launch, *(value for value in vars(launch).values() if isinstance(value, ModuleType))]
    ours = [module for module in modules if module.__name__.startswith("ffpa_hf.kernels.triton")]
    return [(module, name) for module in ours for name, value in vars(module).items() if _is_kernel(value)]


def _is_kernel(value: Any) -> bool:
    return type(value).__module__.startswith("triton.runtime.") and hasattr(value, "run")


def recorded(call: Callable[[], Any]) -> list[Launch]:
    """Run `call`, a second time while its kernel launches are kept; those, in order."""
    call()  # compiles, which must find the kernels as they are
    launches: list[Launch] = []
    places = kernels()
    originals = [getattr(module, name) for module, name in places]
    try:
        for (module, name), kernel in zip(places, originals, strict=True):
            setattr(module, name, _Recorder(kernel, launches))
        call()
    finally:
        for (module, name), kernel in zip(places, originals, strict=True):
            setattr(module, name, kernel)
    return launches


def host_us(call: Callable[[], Any], device: torch.device, seconds: float = 0.5) -> float:
    """Microseconds that the host needs for one call, the median over batches of calls; the device is waited for between
    batches only."""
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < _BATCHES[0] or (len(samples) < _BATCHES[1] and time.perf_counter() - begin < seconds):
        _wait(device)
        start = time.perf_counter()
        for _ in range(_BATCH):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / _BATCH)
    _wait(device)
    return statistics.median(samples)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_case(
    case: Case,
    leaves: tuple[Tensor, Tensor, Tensor],
    device: torch.device,
    *,
    seconds: float = 2.0,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Rows of one case, all direction fwd: F.sdpa, the bare launches, and `ffpa_attn_func` with the Triton backend,
    without a gradient and while recording one. `ms` is host time; the note says how much that is above the launches.

    leaves: query, key and value, which require gradients.
    """
    from ffpa_hf.functional import ffpa_attn_func

    rows: dict[str, Row] = {}
    with settings.override(force_no_sdpa_fallback=True, allow_unqualified=True):

        def ours() -> Any:
            return ffpa_attn_func(*leaves, is_causal=case.causal, enable_gqa=case.group > 1, backend="triton")

        def theirs() -> Any:
            return F.scaled_dot_product_attention(*leaves, is_causal=case.causal, enable_gqa=case.group > 1)

        def bare() -> None:
            for launch in launches:
                launch()

        with torch.no_grad():
            launches = recorded(ours)
            ways: list[tuple[str, bool, Callable[[], Any]]] = [
                ("sdpa", False, theirs),
                (BARE, False, bare),
                ("ffpa_hf/triton", False, ours),
                ("ffpa_hf/triton, recording", True, ours),
            ]
        for name, recording, call in ways:
            on_step(f"{case.id}: {name}")
            with torch.set_grad_enabled(recording):
                for _ in range(5):
                    call()
                rows[name] = Row(case.id, "fwd", name, ms=host_us(call, device, seconds / len(ways)) / 1e3)
    least = rows[BARE].ms or 0.0
    rows[BARE].note = f"host time of {len(launches)} launch{'es' if len(launches) > 1 else ''}"
    for name, row in rows.items():
        if name.startswith("ffpa_hf") and row.ms is not None:
            row.note = f"host time; {1e3 * (row.ms - least):.1f} us above the bare launch"
    return list(rows.values())
