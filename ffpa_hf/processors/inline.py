"""Modules that compute attention inside their own `forward`, with no processor to set (most video autoencoders).

Such a module gets a subclass of its own class whose call runs under `Redirect`; nothing else about it changes.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

from torch.nn import Module, MultiheadAttention

from ffpa_hf.processors.capture import (
    _ATTRIBUTE,
    _PACKED,
    Slot,
    holds_processor,
    is_accelerated,
    names_used,
    slot_of,
    subclass,
)
from ffpa_hf.processors.mask_sources import inline_overrides
from ffpa_hf.processors.redirect import Redirect

if TYPE_CHECKING:
    from ffpa_hf.processors.generic import FFPAAttnProcessor

_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
_ATTENTION = frozenset({"dispatch_attention_fn", "scaled_dot_product_attention"})


@functools.cache
def _used(kind: Any) -> frozenset[str]:
    forward = getattr(kind, "forward", None)
    return names_used(forward, kind) if isinstance(forward, types.FunctionType) else frozenset()


def has_inline_attention(module: Module) -> bool:
    """Does this module's own `forward` (not a child's) call attention, with no processor in between?"""
    kind: Any = type(module)
    return not holds_processor(module) and not isinstance(module, MultiheadAttention) and bool(_used(kind) & _ATTENTION)


def why_out_of_reach(module: Module) -> str | None:
    """The reason why a module's inline attention stays torch's, or None where there is no such attention."""
    kind: Any = type(module)
    if isinstance(module, MultiheadAttention) or _PACKED in _used(kind):
        return "torch's multi_head_attention_forward projects and attends in one call"
    if not holds_processor(module) and _writes_attention_out(kind):
        return "its forward writes softmax attention out"
    return None


@functools.cache
def _writes_attention_out(kind: Any) -> bool:
    """Does a module class's own `forward` take the softmax of one matrix product and multiply with the next?"""
    forward = inspect.unwrap(getattr(kind, "forward", None) or _writes_attention_out)
    if not isinstance(forward, types.FunctionType) or kind.__module__.startswith("torch."):
        return False
    used = [
        (instruction.opname, instruction.argval, instruction.argrepr) for instruction in dis.get_instructions(forward)
    ]
    softmax = any(value == "softmax" for _, value, _ in used)
    products = sum(value in _PRODUCTS or name == "BINARY_MATRIX_MULTIPLY" or text == "@" for name, value, text in used)
    return softmax and products >= 2


def install_inline(module: Module, owner: FFPAAttnProcessor) -> None:
    """Accelerate one such module along `owner.route`. Idempotent; the newest owner counts."""
    slot = slot_of(module)
    if slot is not None:
        slot.owner = owner
        return
    kind: Any = type(module)
    module.__dict__[_ATTRIBUTE] = Slot(owner, None, None, class_name=kind.__name__)
    module.__class__ = accelerated_module_class(kind)


def uninstall_inline(module: Module) -> None:
    """Give the module its own class back."""
    if slot_of(module) is not None and is_accelerated(module):
        module.__class__ = type(module).__dict__["_ffpa_original"]
        delattr(module, _ATTRIBUTE)


@functools.cache
def accelerated_module_class(original: Any) -> type:
    """The subclass of a module class; `__call__` rather than `forward`, so that hooks put on `forward` stay right."""
    plain = original.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        slot = slot_of(self)
        if slot is None:
            return plain(self, *args, **kwargs)
        with Redirect(slot.owner.route, self):
            return plain(self, *args, **kwargs)

    return subclass(original, {"__call__": __call__, **inline_overrides(original)}, accelerated_module_class)
