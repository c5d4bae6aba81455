"""What ffpa_hf adds to diffusers itself: the "ffpa" backend and a few methods. Everything here is undone by `undo`.

Each addition waits for the diffusers module it belongs to; none is imported from here.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import wrapt

from ffpa_hf.processors import capture, fusing, inline, parallel, redirect
from ffpa_hf.processors.generic import FFPAAttnProcessor

logger = logging.getLogger("ffpa_hf")

BACKEND = "ffpa"
_undo: dict[str, list[Callable[[], None]]] = {}
_awaited: set[str] = set()
_active = False


def apply() -> None:
    """Add everything to the diffusers modules that are loaded, and to the others as they load. Idempotent."""
    global _active
    _active = True
    for name, (marker, _) in _ADDITIONS.items():
        module = sys.modules.get(name)
        if module is None and name not in _awaited:
            _awaited.add(name)
            wrapt.register_post_import_hook(_on_import, name)
        elif module is not None and hasattr(module, marker):  # without the marker it is still being imported
            _add(module)


def undo() -> None:
    """Take it all out again. Models that carry an FFPAAttnProcessor keep computing through ffpa_hf."""
    global _active
    _active = False
    for steps in _undo.values():
        for step in reversed(steps):
            step()
    _undo.clear()


def _on_import(module: Any) -> None:
    if _active:
        _add(module)


def _add(module: Any) -> None:
    name = module.__name__
    if name in _undo:
        return
    _undo[name] = []
    try:
        _ADDITIONS[name][1](module, _undo[name])
    except Exception as problem:  # this may run while diffusers is being imported, which must go on
        for step in reversed(_undo.pop(name)):
            step()
        logger.warning(
            "ffpa_hf could not add itself to %s, which differs from what it knows (%s: %s). "
            "ffpa_hf.enable(model) does without it.",
            name,
            type(problem).__name__,
            problem,
        )


def _replace(owner: Any, name: str, value: Any, steps: list[Callable[[], None]]) -> None:
    """Set an attribute of a class; the step that undoes it leaves later replacements by others alone."""
    had, before = name in vars(owner), vars(owner).get(name)

    def put_back() -> None:
        if vars(owner).get(name) is not value:
            return
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    setattr(owner, name, value)
    steps.append(put_back)


# --- setters that remember --------------------------------------------------------------------------------------------


def _remembering_setter(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_processor(self: Any, processor: Any) -> None:
        capture.on_set_processor(self, processor, original)

    return set_processor


def _add_to_attention(module: Any, steps: list[Callable[[], None]]) -> None:
    attention = module.Attention
    _replace(attention, "set_processor", _remembering_setter(attention.set_processor), steps)
    slice_attention = attention.set_attention_slice

    @functools.wraps(slice_attention)
    def set_attention_slice(self: Any, slice_size: int) -> None:
        capture.on_set_attention_slice(self, functools.partial(slice_attention, self, slice_size))

    _replace(attention, "set_attention_slice", set_attention_slice, steps)
    _replace(attention, "fuse_projections", _careful_fusing(attention.fuse_projections), steps)


def _add_to_module_mixin(module: Any, steps: list[Callable[[], None]]) -> None:
    mixin = module.AttentionModuleMixin
    _replace(mixin, "set_processor", _remembering_setter(mixin.set_processor), steps)
    _replace(mixin, "fuse_projections", _careful_fusing(mixin.fuse_projections), steps)


# --- fused projections ------------------------------------------------------------------------------------------------


def _careful_fusing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def fuse_projections(self: Any, *args: Any, **kwargs: Any) -> None:
        if capture.slot_of(self) is not None and (reason := fusing.why_not(self)):
            raise ValueError(f"fuse_projections: {reason}.")
        original(self, *args, **kwargs)

    return fuse_projections


def _add_to_lora(module: Any, steps: list[Callable[[], None]]) -> None:
    mixin = module.PeftAdapterMixin
    for name in ("add_adapter", "load_lora_adapter"):
        _replace(mixin, name, _careful_adapter(getattr(mixin, name)), steps)


def _careful_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """An adapter on projections that are fused would change nothing, silently: say so instead."""

    @functools.wraps(original)
    def add(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = set(getattr(self, "peft_config", ()))
        result = original(self, *args, **kwargs)
        if not any(capture.slot_of(module) for module in self.modules()):
            return result
        if changed := fusing.stale(self):
            if before:
                self.delete_adapters([name for name in self.peft_config if name not in before])
            else:
                self.unload_lora()
            raise ValueError(
                f"the adapter changes projections that are fused, such as those of {changed[0]!r}: it would have no "
                "effect there. Call unfuse_qkv_projections() (after enable(fuse_qkv=True): ffpa_hf.disable) first."
            )
        return result

    return add


# --- models without set_attn_processor --------------------------------------------------------------------------------


def _processor_modules(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if name and capture.holds_processor(module)]


def _add_to_models(module: Any, steps: list[Callable[[], None]]) -> None:
    mixin = module.ModelMixin

    def attn_processors(self: Any) -> dict[str, Any]:
        """Every attention processor of the model, by the name of its module."""
        theirs = _attention_mixin()
        if theirs is not None and isinstance(self, theirs):
            return theirs.attn_processors.fget(self)
        return {f"{name}.processor": module.processor for name, module in _processor_modules(self)}

    def set_attn_processor(self: Any, processor: Any) -> None:
        """Set one processor on every attention module, or one each from a dict keyed as `attn_processors` is.

        Raises ValueError for a dict of another length.
        """
        theirs = _attention_mixin()
        if theirs is not None and isinstance(self, theirs):
            theirs.set_attn_processor(self, processor)
            return
        modules = _processor_modules(self)
        if isinstance(processor, dict) and len(processor) != len(modules):
            raise ValueError(
                f"{len(processor)} processors were given; {type(self).__name__} has {len(modules)} attention modules. "
                "Give one processor for all of them, or a dict keyed as attn_processors is."
            )
        if not modules:
            logger.warning(
                "%s has no attention processors; ffpa_hf.enable(model) reaches attention written inline.",
                type(self).__name__,
            )
        for name, module in modules:
            _set_on(module, processor[f"{name}.processor"] if isinstance(processor, dict) else processor)

    for name, value in (("attn_processors", property(attn_processors)), ("set_attn_processor", set_attn_processor)):
        if not hasattr(mixin, name):
            _replace(mixin, name, value, steps)
    switch, reset = mixin.set_attention_backend, mixin.reset_attention_backend

    @functools.wraps(switch)
    def set_attention_backend(self: Any, backend: str) -> None:
        switch(self, backend)
        _follow_switch(self, backend)

    @functools.wraps(reset)
    def reset_attention_backend(self: Any) -> None:
        reset(self)
        _follow_switch(self, None)

    _replace(mixin, "set_attention_backend", set_attention_backend, steps)
    _replace(mixin, "reset_attention_backend", reset_attention_backend, steps)


def _attention_mixin() -> Any:
    return getattr(sys.modules.get("diffusers.models.attention"), "AttentionMixin", None)


def _set_on(module: Any, processor: Any) -> None:
    if hasattr(module, "set_processor"):
        module.set_processor(processor)
    else:  # MochiAttention and CosmosCausalAttention have a processor and no setter
        capture.on_set_processor(module, processor, lambda target, new: setattr(target, "processor", new))


class _SwitchedProcessor(FFPAAttnProcessor):
    """Put by `model.set_attention_backend("ffpa")` where diffusers' switch reaches nothing; leaves with the switch."""


def _follow_switch(model: Any, backend: Any) -> None:
    wanted = str(getattr(backend, "value", backend)).lower() == BACKEND
    shared = _SwitchedProcessor() if wanted else None
    reached = False
    for module in model.modules():
        if not capture.holds_processor(module):
            continue
        slot = capture.slot_of(module)
        if (wanted or backend is None) and capture.is_made_for_flex(type(module.processor)):
            # Ours is not flex, and neither is the None of a reset; with either it would raise. Its class says flex.
            vars(module.processor).pop("_attention_backend", None)
        if shared is None:
            if slot is not None and isinstance(slot.owner, _SwitchedProcessor):
                capture.uninstall(module)
        elif slot is None and not hasattr(module.processor, "_attention_backend"):
            capture.install(module, shared)
        reached = reached or capture.slot_of(module) is not None or names_our_backend(module.processor)
    if wanted and not reached:
        logger.warning(
            'set_attention_backend("ffpa") does nothing for %s: %s.',
            type(model).__name__,
            "its attention is written inline, which ffpa_hf.enable(model) reaches"
            if any(inline.has_inline_attention(module) for module in model.modules())
            else "it has no softmax attention that could be handed over",
        )


def names_our_backend(processor: Any) -> bool:
    chosen = getattr(processor, "_attention_backend", None)
    return getattr(chosen, "value", chosen) == BACKEND


# --- the backend ------------------------------------------------------------------------------------------------------


def _prepare_environment(module: Any, steps: list[Callable[[], None]]) -> None:
    """DIFFUSERS_ATTN_BACKEND=ffpa: diffusers looks the name up before we can add it, so it starts with its own."""
    if module.DIFFUSERS_ATTN_BACKEND == BACKEND and _dispatch() is None:
        _replace(module, "DIFFUSERS_ATTN_BACKEND", "native", steps)
        global _wanted_by_environment
        _wanted_by_environment = True


_wanted_by_environment = False


def _dispatch() -> Any:
    return sys.modules.get("diffusers.models.attention_dispatch")


def _add_backend(module: Any, steps: list[Callable[[], None]]) -> None:
    names, registry = module.AttentionBackendName, module._AttentionBackendRegistry
    member = str.__new__(names, BACKEND)
    member._name_, member._value_, member.__objclass__ = BACKEND.upper(), BACKEND, names
    member._sort_order_ = len(names._member_names_)
    constraints = [module._check_device, module._check_shape]

    def remove() -> None:
        redirect.backend_registered = False
        if registry._active_backend == member:
            registry.set_active_backend(names.NATIVE)
        for table in (registry._backends, registry._constraints, registry._supported_arg_names):
            table.pop(member, None)
        registry._supports_context_parallel.discard(BACKEND)
        if member._name_ in names._member_names_:
            names._member_names_.remove(member._name_)
        names._member_map_.pop(member._name_, None)
        names._value2member_map_.pop(BACKEND, None)
        if member._name_ in vars(names):
            type.__delattr__(names, member._name_)

    steps.append(remove)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[BACKEND] = member
    type.__setattr__(names, member._name_, member)
    registry.register(member, constraints=constraints, supports_context_parallel=True)(_ffpa_attention)
    redirect.backend_registered = True
    if _wanted_by_environment:
        registry.set_active_backend(member)


def _ffpa_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """diffusers' backend function: `[B, N, H, D]` in and out. A flex BlockMask goes where it belongs, to flex."""
    if attn_mask is not None and not isinstance(attn_mask, torch.Tensor) and type(attn_mask).__name__ == "BlockMask":
        module = _dispatch()
        flex = module._AttentionBackendRegistry._backends[module.AttentionBackendName.FLEX]
        given = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return flex(query, key, value, **given)
    if parallel.is_context_parallel(_parallel_config):
        return parallel.attention(
            _dispatch()._templated_context_parallel_attention,
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            return_lse,
            _parallel_config,
        )
    return redirect.from_dispatch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)


# --- layer skipping ---------------------------------------------------------------------------------------------------


def _add_metadata(module: Any, steps: list[Callable[[], None]]) -> None:
    """Layer-skip hooks look up how to skip a processor by its class; ours asks for the class it stands for."""
    registry = module.AttentionProcessorRegistry

    def skipped_output(attn: Any, *args: Any, **kwargs: Any) -> Any:
        slot = capture.slot_of(attn)
        if slot is None:
            raise ValueError("this module's FFPAAttnProcessor replaced nothing, so there is nothing to skip")
        return registry.get(type(slot.inner)).skip_processor_output_fn(attn, *args, **kwargs)

    metadata = module.AttentionProcessorMetadata(skip_processor_output_fn=skipped_output)
    for kind in (FFPAAttnProcessor, _SwitchedProcessor):
        registry._registry[kind] = metadata
        steps.append(functools.partial(registry._registry.pop, kind, None))


#: diffusers module -> (a name that exists once it is loaded, what to add to it).
_ADDITIONS: dict[str, tuple[str, Callable[[Any, list[Callable[[], None]]], None]]] = {
    "diffusers.utils.constants": ("DIFFUSERS_ATTN_BACKEND", _prepare_environment),
    "diffusers.models.attention_processor": ("AttnProcessor2_0", _add_to_attention),
    "diffusers.models.attention": ("AttentionModuleMixin", _add_to_module_mixin),
    "diffusers.models.modeling_utils": ("ModelMixin", _add_to_models),
    "diffusers.loaders.peft": ("PeftAdapterMixin", _add_to_lora),
    "diffusers.models.attention_dispatch": ("_native_attention", _add_backend),
    "diffusers.hooks._helpers": ("AttentionProcessorRegistry", _add_metadata),
}
