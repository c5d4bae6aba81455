"""transformers: registering "ffpa", and enable / disable of one model.

Imports transformers inside functions only (this may be loaded while transformers is loading). Knows how a model keeps
its attention implementation; knows nothing of masks, kernels or backends.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module

from ffpa_hf import settings
from ffpa_hf.dispatch import Route
from ffpa_hf.patches import attention_classes
from ffpa_hf.patches.attention_interface import NAME, ffpa_attention_forward, ffpa_mask
from ffpa_hf.report import not_accelerated

# --- registration -----------------------------------------------------------------------------------------------------


class _Absent:
    """No entry was there before ours."""


_ABSENT = _Absent()
_before: dict[Any, Any] = {}  # registry class -> the entry that ours replaced


def register() -> None:
    """Put "ffpa" into the attention and the mask registry, both or neither. Idempotent.

    An entry that another package made is replaced, with a warning, and comes back with `unregister`.
    """
    ours = _ours()
    before = {registry: registry._global_mapping.get(NAME, _ABSENT) for registry in ours}
    if all(before[registry] is function for registry, function in ours.items()):
        return
    foreign = [entry for registry, entry in before.items() if entry is not _ABSENT and entry is not ours[registry]]
    if foreign and not settings.silenced():
        names = ", ".join(f"{entry.__module__}.{getattr(entry, '__qualname__', entry)}" for entry in foreign)
        warnings.warn(
            f'ffpa_hf: another package registered attn_implementation="{NAME}" with transformers ({names}); it is '
            "replaced. ffpa_hf.unregister() gives it back.",
            stacklevel=2,
        )
    try:
        for registry, function in ours.items():
            registry.register(NAME, function)
    except Exception:
        _restore(before)
        raise
    for registry, function in ours.items():
        if before[registry] is not function:
            _before[registry] = before[registry]
    attention_classes.offer()


def unregister() -> None:
    """Put both registries back as they were. An entry that someone else put over ours stays theirs."""
    _restore({r: _before.get(r, _ABSENT) for r, function in _ours().items() if r._global_mapping.get(NAME) is function})
    _before.clear()
    attention_classes.withdraw()


def _ours() -> dict[Any, Any]:
    """Registry class -> our entry."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    return {AttentionInterface: ffpa_attention_forward, AttentionMaskInterface: ffpa_mask}


def _seen() -> dict[Any, Any]:
    """Registry class -> the entry that models find; one written into the shared instance hides what is registered."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    shared = {
        AttentionInterface: ALL_ATTENTION_FUNCTIONS,
        AttentionMaskInterface: ALL_MASK_ATTENTION_FUNCTIONS,
    }
    return {registry: instance.get(NAME, _ABSENT) for registry, instance in shared.items()}


def _restore(entries: dict[Any, Any]) -> None:
    for registry, entry in entries.items():
        if entry is _ABSENT:
            registry._global_mapping.pop(NAME, None)
        else:
            registry.register(NAME, entry)


# --- enable and disable -----------------------------------------------------------------------------------------------


@dataclass
class _Enabled:
    """What `enable` changed, kept on the model, so that copies of it can be disabled too."""

    implementations: list[tuple[Any, str | None]] = field(default_factory=list)  # config, what it had
    routes: list[tuple[Module, Route | None]] = field(default_factory=list)  # attention module, what it had


def owns(obj: Any) -> bool:
    """Whether `obj` is a transformers model, or a module (PEFT, DDP, a compiled one...) that holds one."""
    from transformers import PreTrainedModel

    return isinstance(obj, Module) and any(isinstance(module, PreTrainedModel) for module in obj.modules())


def enable(obj: Module, route: Route, *, towers: bool = False, **more: Any) -> None:
    """Switch a model's attention to "ffpa", computed by `route`; only this model changes.

    Models that were built on one and the same config object share its switch: the last one disabled turns it off.

    towers: also switch vision and audio towers beside a text model. By default they keep what they had: their head
    dims are small, they gain nothing. Sub-models whose attention does not go through transformers' interface always
    keep what they had. `ffpa_hf.report(obj)` names both.

    Raises TypeError for an unknown option, ValueError where no attention of the model goes through that interface,
    RuntimeError where "ffpa" is not registered with transformers or is someone else's.
    """
    from transformers import PreTrainedModel

    if more:
        known = "backend, forward_backend, backward_backend, strict, towers"
        raise TypeError(f"enable has no option {', '.join(map(repr, more))} for transformers models; it has {known}.")
    seen = _seen()
    if any(seen[registry] is not function for registry, function in _ours().items()):
        raise RuntimeError(
            f'attn_implementation="{NAME}" is not ours in transformers (unregistered, or taken by another package); '
            "call ffpa_hf.register() first."
        )
    if "_ffpa_enabled" in vars(obj):
        disable(obj)
    roots = list(_roots(obj))
    text = {id(config) for root in roots for config in _text_configs(root.config)}
    chosen: list[Module] = []
    configs: dict[int, Any] = {}
    for module in obj.modules():
        config = getattr(module, "config", None)
        if config is None or not _dispatches(module):
            continue
        if towers or id(config) in text or hasattr(config, "vocab_size"):
            chosen.append(module)
            configs[id(config)] = config
    if not chosen:
        raise ValueError(
            f"{type(obj).__name__} computes its attention itself, not through transformers' attention interface; "
            "ffpa_hf cannot serve it."
        )
    serving = {id(module) for module in chosen}
    for model in (module for module in obj.modules() if isinstance(module, PreTrainedModel)):
        inside = [id(module) for module in model.modules() if _dispatches(module)]
        if serving.intersection(inside):  # it builds masks for attention that changes
            configs[id(model.config)] = model.config
        elif inside:
            not_accelerated(model, "a tower that gains nothing; enable(..., towers=True) switches it")
        elif _has_attention(model):
            not_accelerated(model, "computes its attention itself, not through transformers' interface")
    state = _Enabled()
    for config in configs.values():
        state.implementations.append((config, _take(config)))
        _set_implementation(config, NAME)
    for module in chosen:
        state.routes.append((module, vars(module).get("_ffpa_route")))
        module._ffpa_route = route  # type: ignore[assignment]
    obj._ffpa_enabled = state  # type: ignore[assignment]


def disable(obj: Module) -> None:
    """Undo `enable` on the same object; nothing happens where it was not enabled."""
    state = vars(obj).pop("_ffpa_enabled", None)
    if state is None:
        return
    for module, before in state.routes:
        if before is None:
            vars(module).pop("_ffpa_route", None)
        else:
            module._ffpa_route = before
    for config, implementation in state.implementations:
        if _give_back(config):
            _set_implementation(config, implementation)


#: id of a config -> [the implementation before the first `enable`, how many enabled models use it].
_switched: dict[int, list[Any]] = {}


def _take(config: Any) -> str | None:
    """Count one more model on a config; returns the implementation it had before the first."""
    if id(config) not in _switched:
        _switched[id(config)] = [config._attn_implementation, 0]
        weakref.finalize(config, _switched.pop, id(config), None)
    entry = _switched[id(config)]
    entry[1] += 1
    return entry[0]


def _give_back(config: Any) -> bool:
    """Count one model less; True where none is left (or the config is a copy that was never counted)."""
    entry = _switched.get(id(config))
    if entry is None:
        return True
    entry[1] -= 1
    if entry[1] <= 0:
        del _switched[id(config)]
        return True
    return False


def _set_implementation(config: Any, implementation: str | None) -> None:
    config._attn_implementation = {"": implementation}  # a dict leaves the sub-configs as they are


def _roots(obj: Module) -> Iterator[Any]:
    """The outermost transformers models inside `obj`."""
    from transformers import PreTrainedModel

    if isinstance(obj, PreTrainedModel):
        yield obj
        return
    for child in obj.children():
        yield from _roots(child)


def _text_configs(config: Any) -> list[Any]:
    """The config that a model's text part reads, with everything below it."""
    try:
        text = config.get_text_config()
    except ValueError:  # several text parts: each of them has a vocabulary
        return []
    found, todo = [], [text]
    while todo:
        each = todo.pop()
        found.append(each)
        if each is not config:
            todo += [sub for name in each.sub_configs if (sub := getattr(each, name, None)) is not None]
    return found


def _dispatches(module: Module) -> bool:
    """Whether a module asks transformers' registry for its attention."""
    module_class: Any = type(module)
    return _class_dispatches(module_class)


@functools.cache
def _class_dispatches(module_class: Any) -> bool:
    """Told by the names that the methods of the class use."""
    return any("ALL_ATTENTION_FUNCTIONS" in names for names in _names_used(module_class))


def _names_used(module_class: Any) -> list[tuple[str, ...]]:
    bases = (base for base in module_class.__mro__ if base.__module__ != "transformers.modeling_utils")
    methods = (value for base in bases for value in vars(base).values())
    return [inspect.unwrap(m).__code__.co_names for m in methods if isinstance(m, types.FunctionType)]


def _has_attention(model: Module) -> bool:
    return any("attention" in type(module).__name__.lower() for module in model.modules())
