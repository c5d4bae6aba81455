"""The short way to `attend` outside torch.compile: a processor's own code, with `F.scaled_dot_product_attention` ours.

A function mode intercepts every torch call of a processor to find one; in eager that costs more than the rest of us.
Here the code object is reused with globals in which `F` is `torch.nn.functional` but for that function. torch.compile
resolves globals by module name and would not see it, so there the mode remains.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ffpa_hf.processors.redirect import from_sdpa

_SDPA = "scaled_dot_product_attention"


class _Functional:
    """`torch.nn.functional`, one function replaced."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return from_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


_functional = _Functional()


@functools.lru_cache(maxsize=1024)
def can_rebind(function: types.FunctionType) -> bool:
    """Does `function` itself call F.sdpa, and only as an attribute of a global that is `torch.nn.functional`?"""
    names = {name for name, value in function.__globals__.items() if value is F}
    before: Any = None
    found = False
    for instruction in dis.get_instructions(function):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return False  # it would write into a copy
        if instruction.argval == _SDPA:
            if before not in names:
                return False
            found = True
        before = instruction.argval
    return found and not any(_mentions(constant) for constant in function.__code__.co_consts)


def _mentions(constant: Any) -> bool:
    if not isinstance(constant, types.CodeType):
        return False
    return _SDPA in constant.co_names or any(_mentions(inner) for inner in constant.co_consts)


def rebound(function: types.FunctionType, replaced: tuple[tuple[str, Any], ...] = ()) -> types.FunctionType:
    """`function` with our attention and the globals of this moment; never stored on a module (it has no pickle).

    replaced: further globals, by name.
    """
    twin, names = _twin(function, replaced)
    ours, theirs = twin.__globals__, function.__globals__
    for name in names:  # a helper may have been patched since
        if name in theirs:
            value = theirs[name]
            ours[name] = _functional if value is F else value
    ours.update(replaced)
    return twin


@functools.lru_cache(maxsize=1024)
def _twin(
    function: types.FunctionType, replaced: tuple[tuple[str, Any], ...]
) -> tuple[types.FunctionType, tuple[str, ...]]:
    """The function over a copy of its globals, made once for what is replaced there, and the names it may look up."""
    twin = types.FunctionType(
        function.__code__, dict(function.__globals__), function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin, tuple(sorted(_names(function.__code__)))


def _names(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
