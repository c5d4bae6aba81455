"""The self-test of family "triton-qkv": QK-norm, rotary embedding and placement against their float64 definition.

Builds calls and judges results; the rest (processes, order, verdicts) is `selftest`'s and the command line's.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ffpa_hf.kernels.reference import join_streams
from ffpa_hf.kernels.selftest import ROUNDING, Outcome, distances, nan_in_new_memory


@dataclass(frozen=True)
class Check:
    """One call. lengths: of its streams, text before image as Flux has them; the first stream has no rotary table."""

    dtype: torch.dtype
    head_dim: int
    heads: int = 6
    batch: int = 2
    lengths: tuple[int, ...] = (19, 70)
    norm: Literal["weight", "bare", "none"] = "weight"
    table: Literal["real", "complex", "none"] = "real"
    across_heads: bool = False
    interleaved: bool = True
    layout: Literal["dense", "fused", "unaligned"] = "dense"

    def __str__(self) -> str:
        words = [str(self.dtype).removeprefix("torch."), f"D{self.head_dim}", f"B{self.batch} H{self.heads}"]
        words += ["+".join(map(str, self.lengths)), f"norm {self.norm}", f"table {self.table}"]
        words += ["across heads"] * self.across_heads + ["halves"] * (not self.interleaved)
        return " ".join([*words, *([self.layout] if self.layout != "dense" else [])])


_FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"layout": "fused"},
    {"layout": "unaligned"},
    {"table": "complex", "heads": 24},
    {"table": "none", "heads": 38},
    {"norm": "bare", "lengths": (33,)},
    {"norm": "none", "interleaved": False},
    {"interleaved": False, "heads": 3, "layout": "fused"},
    {"across_heads": True, "heads": 12, "table": "complex"},
    {"across_heads": True, "heads": 40, "layout": "fused", "lengths": (1, 20)},
    {"across_heads": True, "heads": 1, "interleaved": False, "norm": "bare"},
    {"batch": 1, "lengths": (0, 17), "heads": 1},
)
_HEAD_DIMS = (8, 40, 64, 72, 80, 88, 96, 128, 256)


def grid(interpreted: bool = False) -> tuple[Check, ...]:
    """The calls to make; few where they run in Triton's interpreter."""
    if interpreted:
        base = Check(torch.float32, 16, heads=3, lengths=(3, 5))
        small = [replace(base, **{**feature, "lengths": (2, 3), "heads": 3}) for feature in _FEATURES]
        return (*small, replace(base, dtype=torch.float16, head_dim=40), replace(base, dtype=torch.bfloat16))
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    checks = [Check(dtype, head_dim) for dtype in dtypes for head_dim in _HEAD_DIMS]
    for dtype, head_dim in zip(dtypes, (128, 64, 72), strict=True):
        checks += [replace(Check(dtype, head_dim), **feature) for feature in _FEATURES if feature]
    return (*checks, Check(torch.bfloat16, 128, 24, 1, (512, 4096)))


def _arguments(check: Check, device: torch.device) -> tuple[Any, ...]:
    generator = torch.Generator(device).manual_seed(zlib.crc32(str(check).encode()))

    def normal(*shape: int, dtype: torch.dtype = check.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    streams, weights, eps, cos, sin = [], [], [], [], []
    for index, length in enumerate(check.lengths):
        shape = (check.batch, length, check.heads, check.head_dim)
        if check.layout == "fused":
            streams.append(normal(*shape[:2], 3, *shape[2:])[:, :, 1])
        elif check.layout == "unaligned":
            streams.append(normal(*shape[:3], shape[3] + 1)[..., 1:])
        else:
            streams.append(normal(*shape))
        width = check.head_dim * (check.heads if check.across_heads else 1)
        weights.append(normal(width) if check.norm == "weight" else None)
        eps.append(-1.0 if check.norm == "none" else 1e-6 * 10**index)
        table = None if check.table == "none" or (index == 0 and len(check.lengths) > 1) else check.table
        for tables in (cos, sin):
            tables.append(None if table is None else _table(check, normal, length, table))
    return streams, weights, eps, cos, sin, check.across_heads, check.interleaved


def _table(check: Check, normal: Any, length: int, kind: str) -> Tensor:
    """Factors of pairs, in the strides in which models have them."""
    half = check.head_dim // 2
    if kind == "complex":
        return normal(1, length, half, 2, dtype=torch.float32)[..., :1].expand(-1, -1, -1, 2)
    full = normal(check.batch, length, check.head_dim, dtype=torch.float32)
    return full.unflatten(-1, (half, 2)) if check.interleaved else full.unflatten(-1, (2, half)).transpose(-1, -2)


def run_check(check: Check, device: torch.device) -> Outcome:
    """Run one call twice and judge it: rounding of the float64 result and no more, and the same bits again.

    Whatever the kernel raises is an outcome too.
    """
    from ffpa_hf.kernels.triton import qkv_kernels

    outcome = Outcome(check)
    begin = time.perf_counter()
    try:
        streams, *rest = _arguments(check, device)
        exact = join_streams([stream.double() for stream in streams], *rest)
        with nan_in_new_memory():
            given = qkv_kernels.join_streams(streams, *rest)
            again = qkv_kernels.join_streams(streams, *rest)
        if given.shape != exact.shape or given.dtype != check.dtype:
            outcome.note = f"the result is {given.dtype} {tuple(given.shape)}, not {tuple(exact.shape)}"
        else:
            whole, single = distances(given, exact)
            rounding = ROUNDING[check.dtype]
            outcome.errors = [("joint", whole, rounding), ("joint (one element)", single, 1.5 * rounding)]
            outcome.passed = whole <= rounding and single <= 1.5 * rounding
            if outcome.passed and not torch.equal(given, again):
                outcome.passed, outcome.note = False, "the result differs when run again"
    except Exception as error:
        outcome.note = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]
    outcome.seconds = time.perf_counter() - begin
    return outcome
