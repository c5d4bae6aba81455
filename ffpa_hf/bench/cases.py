"""What is timed: one frozen row per attention shape, with the FLOPs it counts for. Pure data; knows no provider.

The ids are those under which results are published, so a row is never changed once it has been measured.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Direction = Literal["fwd", "bwd", "fwd+bwd"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True)
class Case:
    """One attention call to time.

    heads:kv_heads, q_len x kv_len and head_dim as in `[B, H, N, D]`. window: causal sliding window, in keys up to and
    with the row's own. directions: what runs when none are asked for. kv_sets: so many key/value pairs are read in
    turn, so that they do not stay in the cache. graph: the calls are captured in one CUDA graph and replayed.
    """

    id: str
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    kv_heads: int = 0
    batch: int = 1
    causal: bool = False
    window: int | None = None
    directions: tuple[Direction, ...] = ("fwd",)
    kv_sets: int = 1
    graph: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.id}: {self.heads} query heads over {self.kv_heads} key heads")
        if self.window is not None and not self.causal:
            raise ValueError(f"{self.id}: a window is causal here")
        if self.window is not None and self.q_len != self.kv_len:
            raise ValueError(f"{self.id}: a window is counted for square shapes only")
        if self.graph and self.directions != ("fwd",):
            raise ValueError(f"{self.id}: a captured case runs forward only")

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def mask(self) -> Literal["none", "causal", "window"]:
        """The kind of mask, as tables name it."""
        return "window" if self.window is not None else "causal" if self.causal else "none"

    def pairs(self) -> float:
        """Query-key pairs of one head that the mask allows; a square causal mask counts half of N^2."""
        if not self.causal:
            return float(self.q_len * self.kv_len)
        if self.window is None and self.q_len == self.kv_len:
            return self.q_len * self.kv_len / 2
        reach = self.kv_len if self.window is None else min(self.window, self.kv_len)
        ramp = min(self.q_len, reach)
        return float(ramp * (ramp + 1) // 2 + (self.q_len - ramp) * reach)

    def flops(self, direction: Direction) -> float:
        """4 B Hq D per allowed pair forward, 2.5 times that backward, whatever a kernel recomputes."""
        forward = 4.0 * self.batch * self.heads * self.head_dim * self.pairs()
        return forward * {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}[direction]

    def text(self) -> str:
        """The shape in words, for lists."""
        heads = f"{self.heads}" if self.group == 1 else f"{self.heads}:{self.kv_heads}"
        length = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len} x {self.kv_len}"
        mask = {"none": "", "causal": ", causal", "window": f", causal window {self.window}"}[self.mask]
        extra = f", {self.kv_sets} K/V sets in a CUDA graph" if self.graph else ""
        return f"B={self.batch}, {heads} heads, {length}, D={self.head_dim}{mask}{extra}"


def _self(id: str, head_dim: int, length: int, heads: int, *directions: Direction, **more) -> Case:
    return Case(id, heads, length, length, head_dim, directions=directions or ("fwd",), **more)


#: The published cases.
KERNEL: tuple[Case, ...] = (
    _self("d512_self_8k", 512, 8192, 32, "fwd", "bwd"),
    _self("d512_causal_8k", 512, 8192, 32, "fwd", "bwd", causal=True),
    _self("d512_gqa_causal_8k", 512, 8192, 32, "fwd", "bwd", kv_heads=4, causal=True),
    _self("d512_1h_16k", 512, 16384, 1),
    Case("d512_cross_1k_8k", 32, 1024, 8192, 512),
    Case("d512_decode_8k", 32, 1, 8192, 512, kv_heads=4, kv_sets=4, graph=True),
    _self("d320_self_8k", 320, 8192, 32, "fwd", "bwd"),
    _self("d384_self_8k", 384, 8192, 32, "fwd", "bwd"),
    _self("d640_self_4k", 640, 4096, 16, "fwd", "bwd"),
    _self("d1024_self_4k", 1024, 4096, 16, "fwd", "bwd"),
    _self("d256_self_8k", 256, 8192, 32, "fwd", "bwd"),
    _self("d256_window1k_8k", 256, 8192, 32, "fwd", "bwd", kv_heads=16, causal=True, window=1024),
    _self("d128_flux", 128, 4608, 24),
    _self("d64_cogvideox", 64, 17776, 48, batch=2),
    _self("d128_self_16k", 128, 16384, 32),
)

_SWEEP_HEAD_DIMS = (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024)
_SWEEP_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SWEEP_ONE_HEAD_LENGTHS = (1024, 4096, 16384)  # one head: the shape of image autoencoders
_SWEEP_WINDOW = 1024
_SWEEP_HEADS = 16


def _sweep() -> tuple[Case, ...]:
    cases = []
    for head_dim in _SWEEP_HEAD_DIMS:
        for mask in ("none", "causal", "window"):
            more: dict = {} if mask == "none" else {"causal": True}
            if mask == "window":
                more["window"] = _SWEEP_WINDOW
            for length in _SWEEP_LENGTHS:
                name = f"sweep_d{head_dim}_h{_SWEEP_HEADS}_{mask}_n{length}"
                cases.append(_self(name, head_dim, length, _SWEEP_HEADS, "fwd", "bwd", **more))
        for length in _SWEEP_ONE_HEAD_LENGTHS:
            cases.append(_self(f"sweep_d{head_dim}_h1_none_n{length}", head_dim, length, 1, "fwd", "bwd"))
    return tuple(cases)


#: The grid from which the table of automatic choices is built.
SWEEP: tuple[Case, ...] = _sweep()

#: Its corners, for a first table in a few minutes of GPU time.
SWEEP_COARSE: tuple[Case, ...] = tuple(
    case for case in SWEEP if case.head_dim in (64, 128, 256, 320, 512, 1024) and case.q_len in (128, 512, 1024, 4096)
)

#: Small enough for any CPU: the tool's own test.
CPU_SMOKE: tuple[Case, ...] = (
    _self("cpu_self", 64, 48, 2, "fwd", "bwd", dtype="float32"),
    _self("cpu_gqa_causal", 64, 40, 4, "fwd", "fwd+bwd", kv_heads=2, causal=True, dtype="float32"),
    _self("cpu_window", 72, 56, 2, "fwd", kv_heads=1, causal=True, window=16, dtype="float32"),
)

SETS: dict[str, tuple[Case, ...]] = {
    "kernel": KERNEL,
    "sweep": SWEEP,
    "sweep_coarse": SWEEP_COARSE,
    "cpu_smoke": CPU_SMOKE,
}


def select(patterns: Iterable[str]) -> tuple[Case, ...]:
    """Cases of the named sets, by id, or by glob ("d512_*"), each once and in table order.

    Raises ValueError for a pattern that matches nothing.
    """
    everything = [*KERNEL, *SWEEP, *CPU_SMOKE]
    chosen: set[str] = set()
    for pattern in patterns:
        found = [case.id for case in SETS[pattern]] if pattern in SETS else []
        found = found or [case.id for case in everything if fnmatch.fnmatchcase(case.id, pattern)]
        if not found:
            raise ValueError(f"cases={pattern!r} matches no case; use a set ({', '.join(SETS)}), an id or a glob.")
        chosen.update(found)
    return tuple(case for case in everything if case.id in chosen)
