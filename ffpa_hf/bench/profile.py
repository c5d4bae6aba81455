"""Where the time of one run goes, by torch.profiler: the share of attention, and the kernels that took longest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity

#: Operators that are attention, forward and backward, whoever implements them.
_ATTENTION = ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_", "ffpa::flash_attn_")
_MOST_KERNELS = 15
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Kernel:
    """Runs of one kernel (of one operator, on a CPU) together: how many, and milliseconds of device time."""

    name: str
    calls: int
    ms: float


@dataclass(frozen=True)
class Profile:
    """attention_ms: time inside attention operators, which holds what they launch but no mask building around them."""

    attention_ms: float
    kernels: list[Kernel]


def record(function: Callable[[], Any], device: torch.device) -> Profile:
    """Profile one call; device time on a GPU, operator time on a CPU."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        function()
        if cuda:
            torch.cuda.synchronize(device)
    attention = 0.0
    kernels: dict[str, list[float]] = {}
    for event in profiler.events():
        on_device = event.device_type != torch.autograd.DeviceType.CPU
        if on_device == cuda and not getattr(event, "is_user_annotation", False):
            took = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
            kernels.setdefault(event.name, []).append(took)
        if not on_device and _is_attention(event.name) and not _inside_attention(event):
            attention += event.device_time_total if cuda else event.cpu_time_total
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:_MOST_KERNELS]
    return Profile(
        attention / 1e3,
        [Kernel(name[:_LONGEST_NAME], len(times), round(sum(times) / 1e3, 4)) for name, times in longest],
    )


def _is_attention(name: str) -> bool:
    return name.startswith(_ATTENTION)


def _inside_attention(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if _is_attention(parent.name):
            return True
        parent = parent.cpu_parent
    return False
