"""What was measured and what was verified, as data: tile and preference tables, verdicts, the store that keeps them.

Knows files and numbers. Only the tuner (`triton_tuner`) runs a kernel, and imports it when it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable)


def constant_under_compile(function: _Function) -> _Function:
    """Let torch.compile call a function while it traces and take the answer as a constant of the graph.

    What `torch.compiler.assume_constant_result` does, whose use alone loads the whole compiler, for seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_generation = 0


def generation() -> int:
    """How often the tables have changed in this process: what was planned with older ones is planned anew."""
    return _generation


def tables_changed() -> None:
    """Say that a table has been written or is to be read again."""
    global _generation
    _generation += 1
