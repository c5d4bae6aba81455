"""What ran where: counters of attention calls, per module and since import.

Counts plans, never tensors; adds nothing under torch.compile. Knows neither transformers nor diffusers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

if TYPE_CHECKING:
    from ffpa_hf.call import AttentionCall
    from ffpa_hf.dispatch import Plan


@dataclass(frozen=True)
class CallSite:
    """Calls of one module that were served alike. lengths: (Nq, Nkv, calls), one entry for each power of two."""

    module_name: str
    module_class: str
    shape: str
    backend: str
    backward: str
    reason: str
    calls: int
    call: AttentionCall | None = None
    lengths: tuple[tuple[int, int, int], ...] = ()


class Report:
    """Rows of `CallSite`; `str()` is a table.

    uncalled: one row without calls for each attention module that no row speaks of; `reason` says what stands on it.
    """

    def __init__(self, rows: list[CallSite], uncalled: list[CallSite] | None = None) -> None:
        self.rows, self.uncalled = rows, uncalled or []

    def __iter__(self) -> Iterator[CallSite]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def backends(self) -> dict[str, int]:
        """Calls per backend name."""
        total: dict[str, int] = {}
        for row in self.rows:
            total[row.backend] = total.get(row.backend, 0) + row.calls
        return total

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calls as JSON, for `ffpa-hf autotune --shapes-from`; the file is replaced in one step."""
        rows = []
        for row in self.rows:
            if row.call is None:
                continue
            for q_len, kv_len, calls in row.lengths:
                fields = dataclasses.asdict(dataclasses.replace(row.call, q_len=q_len, kv_len=kv_len))
                dtypes = {name: str(value) for name, value in fields.items() if isinstance(value, torch.dtype)}
                where = {"module": row.module_name, "backend": row.backend, "calls": calls}
                rows.append({**where, "call": {**fields, **dtypes}})
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"format": "ffpa_hf calls", "rows": rows}, file, indent=1)
                file.write("\n")
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def __str__(self) -> str:
        if not self.rows:
            return "\n".join(["No attention call was counted.", *self._waiting()])
        head = ("module", "class", "calls", "served by", "backward", "shapes", "why")
        lines = [
            (row.module_name or "-", row.module_class, str(row.calls), row.backend, row.backward, row.shape, row.reason)
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, *lines)
        ) + "".join(f"\n{line}" for line in self._waiting())

    def _waiting(self) -> list[str]:
        """The uncalled modules, those of one state in one line."""
        states: dict[str, list[str]] = {}
        for row in self.uncalled:
            states.setdefault(row.reason, []).append(row.module_name or row.module_class)
        return [
            f"{reason}: {len(names)} module{'s' * (len(names) > 1)}, from {names[0]}"
            for reason, names in states.items()
        ]


class _Tally:
    """Calls alike but for their lengths, and how far those went: a decoded token must not be a row of its own."""

    __slots__ = ("buckets", "call", "calls", "keys", "queries")

    def __init__(self, call: AttentionCall) -> None:
        self.calls, self.queries, self.keys = 0, (1 << 62, 0), (1 << 62, 0)
        self.call = call
        self.buckets: dict[tuple[int, int], list[int]] = {}

    def add(self, call: AttentionCall) -> None:
        q_len, kv_len = call.q_len, call.kv_len
        self.calls += 1
        if call.needs_grad and not self.call.needs_grad:
            self.call = call
        bucket = self.buckets.get((q_len.bit_length(), kv_len.bit_length()))
        if bucket is None:
            bucket = self.buckets[q_len.bit_length(), kv_len.bit_length()] = [q_len, kv_len, 0]
        bucket[2] += 1
        if q_len > bucket[0] or kv_len > bucket[1]:
            bucket[0], bucket[1] = max(bucket[0], q_len), max(bucket[1], kv_len)
        low, high = self.queries
        if q_len < low or q_len > high:
            self.queries = min(low, q_len), max(high, q_len)
        low, high = self.keys
        if kv_len < low or kv_len > high:
            self.keys = min(low, kv_len), max(high, kv_len)

    def lengths(self) -> str:
        queries, keys = (f"{low}" if low == high else f"{low}..{high}" for low, high in (self.queries, self.keys))
        return queries if queries == keys else f"{queries}x{keys}"


_Key = tuple[str, str, str, str]  # shape with a place for the lengths, backend, backward, reason
_by_module: weakref.WeakKeyDictionary[Module, dict[_Key, _Tally]] = weakref.WeakKeyDictionary()
_not_accelerated: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()
_total: dict[_Key, _Tally] = {}
#: Each says what stands on an attention module of its library, or None of a module that is none.
_describers: list[Callable[[Module], str | None]] = []


def record(plan: Plan, site: Module | None = None) -> None:
    """Count one call that `plan` decided; `site` is the module it was made for."""
    _count(_total, plan)
    if site is not None:
        _count(_by_module.setdefault(site, {}), plan)


def _count(counts: dict[_Key, _Tally], plan: Plan) -> None:
    tally = counts.get(plan.kind)
    if tally is None:
        tally = counts.setdefault(plan.kind, _Tally(plan.call))
    tally.add(plan.call)


def not_accelerated(module: Module, reason: str) -> None:
    """Note that a module computes attention which ffpa_hf leaves alone, and why."""
    _not_accelerated[module] = reason


def add_describer(describe: Callable[[Module], str | None]) -> None:
    """Let a library's patch say what stands on its attention modules before any call. Idempotent."""
    if describe not in _describers:
        _describers.append(describe)


def forget(model_or_pipeline: Any) -> None:
    """Drop the notes of `not_accelerated` inside a model or pipeline, once it is ours no longer; counts stay."""
    for _, module in _modules(model_or_pipeline):
        for child in module.modules():
            _not_accelerated.pop(child, None)


def reset() -> None:
    """Forget everything counted."""
    _by_module.clear()
    _not_accelerated.clear()
    _total.clear()


def report(model_or_pipeline: Any = None) -> Report:
    """Which backend served which module's attention, and why.

    model_or_pipeline: a torch module, or a diffusers pipeline (its components are walked). None: everything counted
    since import, without modules.
    """
    if model_or_pipeline is None:
        return Report([_row("", "", key, tally) for key, tally in _total.items()])
    rows, uncalled = [], []
    for prefix, module in _modules(model_or_pipeline):
        for name, child in module.named_modules():
            full = ".".join(part for part in (prefix, name) if part)
            for key, tally in _by_module.get(child, {}).items():
                rows.append(_row(full, type(child).__name__, key, tally))
            if child in _not_accelerated:
                rows.append(CallSite(full, type(child).__name__, "", "native", "native", _not_accelerated[child], 0))
            elif child not in _by_module:
                for state in filter(None, (describe(child) for describe in _describers)):
                    uncalled.append(CallSite(full, type(child).__name__, "", "", "", state, 0))
    return Report(rows, uncalled)


def _row(name: str, kind: str, key: _Key, tally: _Tally) -> CallSite:
    shape, backend, backward, reason = key
    lengths = tuple((q, k, calls) for q, k, calls in tally.buckets.values())
    return CallSite(
        name, kind, shape.format(tally.lengths()), backend, backward, reason, tally.calls, tally.call, lengths
    )


def _modules(owner: Any) -> list[tuple[str, Module]]:
    if isinstance(owner, Module):
        return [("", owner)]
    components = getattr(owner, "components", None)
    if isinstance(components, dict):
        return [(name, part) for name, part in components.items() if isinstance(part, Module)]
    raise TypeError(f"report takes a torch module or a diffusers pipeline, not {type(owner).__name__}.")
