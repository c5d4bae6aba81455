"""What was measured and what was verified, as data: preference tables, verdicts, and the store that keeps them.

Knows files and numbers; imports no kernel.
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
