"""What a module had before `FFPAAttnProcessor` came, and how to re-run it: capture, classification, restoration.

All state is one `Slot` on the module it belongs to. Knows diffusers' conventions but does not import diffusers.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn import Module

from ffpa_hf.dispatch import Route
from ffpa_hf.processors import signature
from ffpa_hf.processors.native import native_of
from ffpa_hf.processors.rebind import can_rebind, rebound
from ffpa_hf.processors.redirect import Redirect, run_for
from ffpa_hf.report import not_accelerated

if TYPE_CHECKING:
    from ffpa_hf.processors.generic import FFPAAttnProcessor

_ATTRIBUTE = "_ffpa_slot"
_DISPATCH, _SDPA, _FLEX = "dispatch_attention_fn", "scaled_dot_product_attention", "flex_attention"
_PACKED = "multi_head_attention_forward"  # torch's own module: projections, attention and all in one call
_UNNAMED = "dispatch_attention_fn without a backend"
_DISPATCH_MODULE = "diffusers.models.attention_dispatch"


@dataclass(eq=False)
class Slot:
    """One module's captured processor and how it is run.

    owner: the FFPAAttnProcessor whose route counts. inner: the very object that was replaced, or that stays in place
    (in_place). function: what computes: inner, or its twin that calls F.sdpa. rebind: it does so itself and nowhere
    else (see `rebind`). worker: a copy of inner whose dispatch names our backend, or None. needs_mode: its calls do not
    all go through that backend. native: what computes instead of all these where it knows the call. accepts: the
    arguments it names. scale: for twins of processors that multiply by `attn.scale`. unfused: the slot from before
    `fuse_qkv_projections`. enabled, before_enable: `ffpa_hf.enable` put owner here, over this FFPAAttnProcessor if any.
    """

    owner: FFPAAttnProcessor
    inner: Any
    function: Any
    worker: Any = None
    backend: Any = None
    needs_mode: bool = False
    native: Any = None
    rebind: bool = False
    takes_parallel_config: bool = False
    accepts: frozenset[str] = frozenset()
    class_name: str = ""
    scale: float | None = None
    in_place: bool = False
    unfused: Slot | None = None
    enabled: bool = False
    before_enable: FFPAAttnProcessor | None = None


def slot_of(module: Module) -> Slot | None:
    """The module's slot, or None."""
    return getattr(module, _ATTRIBUTE, None)


def holds_processor(module: Module) -> bool:
    """Is this an attention module that asks a processor to compute?"""
    return callable(getattr(module, "processor", None))


def how_served(slot: Slot) -> str:
    """By which of the ways of docs/diffusers.md the attention of a module with this slot is redirected."""
    if slot.native is not None:
        return "native" if slot.function is not None else "mask in O(N)"
    if slot.function is None:
        return "inline"
    if slot.in_place:
        return "in place"
    if slot.function is not slot.inner:
        return "2_0 twin"
    return "F.sdpa" if slot.worker is None else "dispatcher"


def is_ours(processor: Any) -> bool:
    from ffpa_hf.processors.generic import FFPAAttnProcessor

    return isinstance(processor, FFPAAttnProcessor)


# --- putting in and taking out ----------------------------------------------------------------------------------------


def install(module: Module, owner: FFPAAttnProcessor) -> None:
    """Let `owner` answer for `module`, remembering what did so far. A processor that must stay in place does.

    Setting it again, also over another FFPAAttnProcessor, keeps what was remembered.
    """
    current, slot = getattr(module, "processor", None), slot_of(module)
    if is_ours(current):
        if slot is None:  # set in a constructor, or written to the attribute directly: nothing was replaced
            _write(module, owner)
            return
        if owner is slot.owner and slot.unfused is not None:  # what `unfuse_qkv_projections` does
            slot = slot.unfused
        _keep(module, _with_owner(slot, owner))
        _write(module, owner)
        return
    if slot is not None and slot.in_place and slot.inner is current:
        slot.owner = owner
        return
    if slot is not None and not slot.in_place and _is_visitor(current):
        # PAG and SAG write their own to the attribute for the length of a pipeline call, then put ours back.
        _keep(module, _with_owner(slot, owner))
        _write(module, owner)
        return
    if current is None:
        _write(module, owner)
        return
    made = capture(module, current, owner)
    if isinstance(made, str):
        not_accelerated(module, made)
        return
    _keep(module, made)
    if made.in_place:
        kind: Any = type(current)
        if not is_accelerated(current):  # one object may serve several modules
            current.__class__ = accelerated_class(kind)
    else:
        _write(module, owner)


def uninstall(module: Module) -> None:
    """Put back the very object that `install` replaced. Nothing happens where nothing was installed."""
    slot = slot_of(module)
    if slot is None:
        return
    forget(module)
    if not slot.in_place and is_ours(module.processor):
        _pass_on_parallel_config(slot)
        _write(module, slot.inner)


def enable(module: Module, owner: FFPAAttnProcessor) -> None:
    """`install` for `ffpa_hf.enable`: `disable` gives back an FFPAAttnProcessor that somebody had set before."""
    current, slot = getattr(module, "processor", None), slot_of(module)
    if is_ours(current) and slot is None:
        slot = adopt(module, current)  # type: ignore[arg-type]
    before = None
    if slot is not None:
        before = slot.before_enable if slot.enabled else slot.owner
        if not slot.in_place and not is_ours(current):
            before = None  # the slot is left over from before somebody wrote to the attribute
    install(module, owner)
    made = slot_of(module)
    if made is not None:
        made.enabled, made.before_enable = True, before


def disable(module: Module) -> None:
    """Undo `enable`, or remove an FFPAAttnProcessor that was set by hand."""
    slot = slot_of(module)
    if slot is None or slot.before_enable is None or not (slot.in_place or is_ours(module.processor)):
        uninstall(module)
        return
    before, slot.enabled, slot.before_enable = slot.before_enable, False, None
    install(module, before)


def put_back(module: Module, processor: Any, slot: Slot | None) -> None:
    """Give a module the processor and the slot that it had at some time before."""
    forget(module)
    if slot is not None:
        _keep(module, slot)
    _write(module, processor)


def forget(module: Module) -> None:
    """Drop the slot; a processor that stayed in place gets its own class back."""
    slot = slot_of(module)
    if slot is None:
        return
    delattr(module, _ATTRIBUTE)
    if slot.in_place and is_accelerated(slot.inner):
        slot.inner.__class__ = type(slot.inner)._ffpa_original


def adopt(module: Module, owner: FFPAAttnProcessor) -> Slot:
    """The slot of a module whose processor was never captured: its class's own default, where it declares one.

    Raises RuntimeError where it does not: which of the many processors would be right is not guessed.
    """
    default = getattr(type(module), "_default_processor_cls", None)
    if default is None:
        raise RuntimeError(
            f"FFPAAttnProcessor was given to a {type(module).__name__} that never had another processor, so there is "
            "nothing to accelerate. Build the module with its own processor, then call "
            "module.set_processor(FFPAAttnProcessor()) or ffpa_hf.enable(model)."
        )
    made = capture(module, default(), owner)
    if isinstance(made, str):
        raise RuntimeError(f"FFPAAttnProcessor cannot stand for {default.__name__}: {made}.")
    _keep(module, made)
    return made


def _is_visitor(processor: Any) -> bool:
    name = type(processor).__name__
    return "PAG" in name or "Store" in name


def _keep(module: Module, slot: Slot) -> None:
    module.__dict__[_ATTRIBUTE] = slot


def _with_owner(slot: Slot, owner: FFPAAttnProcessor) -> Slot:
    if slot.owner is owner:
        return slot
    _pass_on_parallel_config(slot)
    return replace(slot, owner=owner)


def _pass_on_parallel_config(slot: Slot) -> None:
    """enable_parallelism tells the installed processor only; whoever comes after it must know too."""
    if slot.takes_parallel_config and slot.owner._parallel_config is not None:
        slot.inner._parallel_config = slot.owner._parallel_config


def _write(module: Module, processor: Any) -> None:
    if not isinstance(processor, Module):
        module._modules.pop("processor", None)
    module.processor = processor


# --- looking at a processor -------------------------------------------------------------------------------------------

#: Processors that write softmax out, and the twin that computes the same through F.sdpa. `attn.scale` is theirs alone.
_TWINS = {
    "AttnProcessor": "AttnProcessor2_0",
    "SlicedAttnProcessor": "AttnProcessor2_0",
    "XFormersAttnProcessor": "AttnProcessor2_0",
    "AttnAddedKVProcessor": "AttnAddedKVProcessor2_0",
    "SlicedAttnAddedKVProcessor": "AttnAddedKVProcessor2_0",
    "XFormersAttnAddedKVProcessor": "AttnAddedKVProcessor2_0",
    "XFormersJointAttnProcessor": "JointAttnProcessor2_0",
    "CustomDiffusionAttnProcessor": "CustomDiffusionAttnProcessor2_0",
    "CustomDiffusionXFormersAttnProcessor": "CustomDiffusionAttnProcessor2_0",
    "IPAdapterAttnProcessor": "IPAdapterAttnProcessor2_0",
    "IPAdapterXFormersAttnProcessor": "IPAdapterAttnProcessor2_0",
}
_LEGACY_MODULE = "diffusers.models.attention_processor"


def capture(module: Module, inner: Any, owner: FFPAAttnProcessor) -> Slot | str:
    """The slot that lets `owner` stand for `inner`, or the reason why `inner` is better left alone."""
    in_place = isinstance(inner, Module)
    kind = type(inner)
    holder: Any = type(module)
    twin = _twin(kind)
    call = _call_of(twin or inner)
    if call is None:
        return f"{kind.__name__} is not written in Python"
    found = names_used(call, twin or kind, holder)
    if _pinned_to_flex(kind, call, found):
        return f"{kind.__name__} is made for flex attention"
    if not found & {_DISPATCH, _SDPA} and kind.__module__.startswith("diffusers."):
        return f"{kind.__name__} computes no softmax attention that could be handed over"
    slot = Slot(owner, inner, inner, accepts=_named_parameters(call), class_name=kind.__name__, in_place=in_place)
    signature.grow(slot.accepts)
    slot.rebind = (
        _DISPATCH not in found
        and can_rebind(call)
        and call is (inner if inspect.isfunction(inner) else (twin or kind).__call__)  # not behind a decorator
        and not names_used(call, twin or kind, holder, beyond=True) & {_SDPA}
    )
    if twin is not None:
        slot.scale = None if getattr(module, "scale_qk", True) else module.scale  # type: ignore[assignment]
        slot.function = call if in_place else twin()
    elif in_place:
        slot.function = call
    elif _DISPATCH in found and hasattr(inner, "_attention_backend"):
        slot.backend = _our_backend()
        slot.worker = copy.copy(inner) if slot.backend is not None else None
        slot.takes_parallel_config = hasattr(inner, "_parallel_config")
        slot.needs_mode = bool(found & {_SDPA, _UNNAMED})
    if not in_place and slot.scale is None:
        slot.native = native_of(type(slot.function))  # type: ignore[arg-type]
    return slot


def _our_backend() -> Any:
    """diffusers' name for our backend, where it is registered."""
    module = sys.modules.get(_DISPATCH_MODULE)
    return None if module is None else module.AttentionBackendName._value2member_map_.get("ffpa")


def _twin(kind: type) -> type | None:
    if kind.__module__ != _LEGACY_MODULE or kind.__name__ not in _TWINS:
        return None
    return getattr(sys.modules[_LEGACY_MODULE], _TWINS[kind.__name__])


def _call_of(processor: Any) -> types.FunctionType | None:
    if inspect.isfunction(processor):
        call: Any = processor
    else:
        call = (processor if isinstance(processor, type) else type(processor)).__call__
    call = inspect.unwrap(call)
    return call if isinstance(call, types.FunctionType) else None


def _named_parameters(call: Callable[..., Any]) -> frozenset[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(name for name, parameter in inspect.signature(call).parameters.items() if parameter.kind in kinds)


def is_made_for_flex(kind: type) -> bool:
    """Does a processor class itself declare the flex backend?"""
    declared = getattr(kind, "_attention_backend", None)
    return getattr(declared, "value", declared) == "flex"


def _pinned_to_flex(kind: type, call: types.FunctionType, found: frozenset[str]) -> bool:
    names = call.__code__.co_names
    always = _DISPATCH in names and "_attention_backend" not in names  # else its other calls take the chosen backend
    return (
        is_made_for_flex(kind) or _FLEX in found or (always and ("FLEX" in names or "flex" in call.__code__.co_consts))
    )


@functools.lru_cache(maxsize=1024)
def names_used(call: types.FunctionType, *owners: type, beyond: bool = False) -> frozenset[str]:
    """Which attention functions `call` reaches: itself, through helpers of its module or methods of `owners`.

    `_UNNAMED` is among them where a function dispatches more often than it reads a backend to name. beyond: leave out
    what `call` does itself.
    """
    wanted = {_DISPATCH, _SDPA, _FLEX, _PACKED}
    found: set[str] = set()
    queue, seen = [call], {call}
    while queue:
        function = queue.pop()
        names = _code_names(function.__code__)
        if not (beyond and function is call):
            found |= names & wanted
        if any(function.__globals__.get(name) is F.scaled_dot_product_attention for name in names):
            found.add(_SDPA)  # imported under another name
        if _DISPATCH in names:
            used = [instruction.argval for instruction in dis.get_instructions(function)]
            named = used.count("_attention_backend") + used.count("backend") + used.count("FLEX")
            if used.count(_DISPATCH) > named:
                found.add(_UNNAMED)
        for name in names - wanted:
            helpers = [function.__globals__.get(name)]
            if not name.startswith("__") and name != "forward" or "super" in names:
                helpers += [base.__dict__.get(name) for owner in owners for base in owner.__mro__ if _of_library(base)]
            for helper in helpers:
                helper = inspect.unwrap(helper) if callable(helper) and hasattr(helper, "__wrapped__") else helper
                if not isinstance(helper, types.FunctionType) or helper in seen:
                    continue
                if helper.__module__ == function.__module__ or helper is not function.__globals__.get(name):
                    seen.add(helper)
                    queue.append(helper)
    return frozenset(found)


def _code_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _code_names(constant)
    return names


def _of_library(base: type) -> bool:
    return base is not object and not base.__module__.startswith("torch.")


# --- running ----------------------------------------------------------------------------------------------------------


def run_sdpa(slot: Slot, route: Route, attn: Module, args: Any, kwargs: Any) -> Any:
    """Run a processor whose attention is F.scaled_dot_product_attention."""
    if slot.rebind and not torch.compiler.is_compiling():
        function = slot.function
        if not isinstance(function, types.FunctionType):
            args, function = (function, *args), type(function).__call__
        return run_for((route, attn, slot.scale), rebound(function), args, kwargs)
    with Redirect(route, attn, slot.scale):
        return slot.function(*args, **kwargs)


# --- processors that stay in place ------------------------------------------------------------------------------------


def is_accelerated(thing: Any) -> bool:
    return "_ffpa_original" in type(thing).__dict__


@functools.cache
def accelerated_class(original: type) -> type:
    """A subclass of a processor class with weights; its instances keep their state, name and `isinstance` answers."""
    plain = original.__call__

    @functools.wraps(plain)
    def __call__(self: Any, attn: Module, *args: Any, **kwargs: Any) -> Any:
        slot = slot_of(attn)
        if slot is None or slot.inner is not self:
            return plain(self, attn, *args, **kwargs)
        return run_sdpa(slot, slot.owner.route, attn, (self, attn, *args), kwargs)

    return subclass(original, {"__call__": __call__}, accelerated_class)


def subclass(original: type, methods: dict[str, Any], maker: Callable[[type], type]) -> type:
    """A subclass that looks like `original` and can be pickled: it is rebuilt by `maker(original)`."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _rebuild, (maker.__module__, maker.__name__, original), dict(self.__dict__)

    body = {
        **methods,
        "__reduce_ex__": __reduce_ex__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_ffpa_original": original,
    }
    return type(original)(original.__name__, (original,), body)


def _rebuild(module: str, maker: str, original: type) -> Any:
    made = getattr(sys.modules[module], maker)(original)
    return made.__new__(made)


# --- what diffusers' own setters do while we are installed ------------------------------------------------------------


def on_set_processor(module: Module, processor: Any, original: Callable[[Module, Any], None]) -> None:
    """`set_processor` of diffusers' attention modules. original: what the method did before."""
    if is_ours(processor):
        install(module, processor)
        return
    slot = slot_of(module)
    active = slot is not None and (is_ours(getattr(module, "processor", None)) or slot.in_place)
    if slot is None or processor is slot.inner and slot.in_place:
        original(module, processor)
        return
    fused = type(processor).__name__.startswith("Fused")
    if fused and active and "Added" in slot.class_name:
        raise ValueError(
            "`fuse_qkv_projections()` is not supported for models having added KV projections "
            f"(this module's own processor is {slot.class_name}, behind FFPAAttnProcessor)."
        )
    forget(module)
    original(module, processor)
    if active and (fused or isinstance(processor, Module) and "IPAdapter" in type(processor).__name__):
        # fuse_qkv_projections and load_ip_adapter replace every processor; acceleration stays on.
        install(module, slot.owner)
        made = slot_of(module)
        if made is not None:
            made.enabled, made.before_enable = slot.enabled, slot.before_enable
            made.unfused = slot if fused else None


def on_set_attention_slice(module: Module, original: Callable[[], None]) -> None:
    """`set_attention_slice`: slicing bounds the memory of a written-out softmax; ours stays and has none to bound."""
    slot = slot_of(module)
    if slot is not None and slot.in_place and slot.inner is module.processor:
        return  # an adapter's weights live on the processor, which slicing would replace
    owner = module.processor if is_ours(module.processor) else None
    original()
    if owner is not None and not is_ours(module.processor):
        install(module, owner)  # type: ignore[arg-type]
