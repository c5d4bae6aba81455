"""What ran where: counters of attention calls, per module and since import.

Counts plans, never tensors; adds nothing under torch.compile. Knows neither transformers nor diffusers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn import Module

if TYPE_CHECKING:
    from ffpa_hf.dispatch import Plan


@dataclass(frozen=True)
class CallSite:
    """Calls of one module that were served alike."""

    module_name: str
    module_class: str
    shape: str
    backend: str
    backward: str
    reason: str
    calls: int


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

    __slots__ = ("calls", "keys", "queries")

    def __init__(self) -> None:
        self.calls, self.queries, self.keys = 0, (1 << 62, 0), (1 << 62, 0)

    def add(self, q_len: int, kv_len: int) -> None:
        self.calls += 1
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
    call = plan.call
    _count(_total, plan.kind, call.q_len, call.kv_len)
    if site is not None:
        _count(_by_module.setdefault(site, {}), plan.kind, call.q_len, call.kv_len)


def _count(counts: dict[_Key, _Tally], key: _Key, q_len: int, kv_len: int) -> None:
    tally = counts.get(key)
    if tally is None:
        tally = counts.setdefault(key, _Tally())
    tally.add(q_len, kv_len)


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
    return CallSite(name, kind, shape.format(tally.lengths()), backend, backward, reason, tally.calls)


def _modules(owner: Any) -> list[tuple[str, Module]]:
    if isinstance(owner, Module):
        return [("", owner)]
    components = getattr(owner, "components", None)
    if isinstance(components, dict):
        return [(name, part) for name, part in components.items() if isinstance(part, Module)]
    raise TypeError(f"report takes a torch module or a diffusers pipeline, not {type(owner).__name__}.")
