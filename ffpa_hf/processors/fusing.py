"""`enable(fuse_qkv=True)`: diffusers' fused projections, where they are right, and the way back to what was there.

diffusers concatenates weights once; what hangs on the separate projections (LoRA, quantised or cast storage, an adapter
in the processor) would be left out without a word. Such a model is refused with a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ffpa_hf.processors import capture

_STATE = "_ffpa_fused"
_FUSED_LAYERS = ("to_qkv", "to_kv", "to_added_qkv", "to_added_kv")
_SEPARATE = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
_MISSING = object()


@dataclass
class _Before:
    """What one attention module had: its processor, our slot, its flag and which of the fused layers."""

    module: nn.Module
    processor: Any
    slot: Any
    fused: Any
    layers: frozenset[str]


def is_plain(layer: Any) -> bool:
    """A linear layer that is its weight and bias and nothing else; torchao keeps the class and changes the weight."""
    return type(layer) is nn.Linear and type(layer.weight) in (nn.Parameter, Tensor)


def why_not(module: Any) -> str | None:
    """The reason why the projections of one attention module must stay apart, or None."""
    if isinstance(getattr(module, "processor", None), nn.Module):
        return f"its processor {type(module.processor).__name__} holds weights that fusing would drop"
    for name in _SEPARATE:
        layer = getattr(module, name, None)
        if layer is None:
            continue
        if not is_plain(layer):
            kind = type(layer if type(layer) is not nn.Linear else layer.weight).__qualname__
            return f"{name} is made of a {kind}, whose own work (LoRA, quantisation) the fused weights would leave out"
        if not layer.weight.is_floating_point() or layer.weight.element_size() < 2:
            return f"{name} is stored as {layer.weight.dtype}; fuse before casting"
    return None


def stale(model: nn.Module) -> list[str]:
    """Modules that compute with fused weights while one of their separate projections has become more than those."""
    return [
        name
        for name, module in model.named_modules()
        if any(isinstance(getattr(module, layer, None), nn.Module) for layer in _FUSED_LAYERS)
        and getattr(module, "fused_projections", False)
        and any(not is_plain(layer) for part in _SEPARATE if (layer := getattr(module, part, None)) is not None)
    ]


def fuse(model: Any) -> None:
    """Fuse a model's projections; `unfuse` gives back what was there. Nothing happens where diffusers has no such way.

    Raises ValueError where the fused model would be wrong or would not run; the model is then as before.
    """
    if not hasattr(model, "fuse_qkv_projections") or _STATE in vars(model):
        return
    before = [
        _Before(
            module,
            module.processor,
            capture.slot_of(module),
            vars(module).get("fused_projections", _MISSING),
            frozenset(layer for layer in _FUSED_LAYERS if layer in module._modules),
        )
        for module in model.modules()
        if capture.holds_processor(module)
    ]
    if all(entry.fused is True for entry in before):
        return  # the user did it: it is not ours to undo
    for entry in before:
        if hasattr(entry.module, "fuse_projections") and (reason := why_not(entry.module)):
            raise ValueError(f"fuse_qkv=True for {type(model).__name__}: {reason}.")
    original = vars(model).get("original_attn_processors", _MISSING)
    vars(model)[_STATE] = (before, original)
    try:
        model.fuse_qkv_projections()
        for entry in before:
            if reason := _why_broken(entry.module):
                raise NotImplementedError(reason)
    except Exception as problem:
        unfuse(model)
        raise ValueError(
            f"fuse_qkv=True for {type(model).__name__}: diffusers cannot fuse this model's projections ({problem})."
        ) from problem


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`. Nothing happens where it did nothing."""
    state = vars(model).pop(_STATE, None)
    if state is None:
        return
    before, original = state
    for entry in before:
        for layer in _FUSED_LAYERS:
            if layer in entry.module._modules and layer not in entry.layers:
                delattr(entry.module, layer)
        _restore(entry.module, "fused_projections", entry.fused)
        if _came_from_fusing(entry.module):
            capture.put_back(entry.module, entry.processor, entry.slot)
    _restore(model, "original_attn_processors", original)


def _came_from_fusing(module: Any) -> bool:
    slot = capture.slot_of(module)
    stands = slot.inner if slot is not None and capture.is_ours(module.processor) else module.processor
    return type(stands).__name__.startswith("Fused")


def _why_broken(module: Any) -> str | None:
    """diffusers' fused processors of this module fail when they run; found by running them."""
    slot = capture.slot_of(module)
    name = type(slot.inner if slot is not None else module.processor).__name__
    if not name.startswith("Fused"):
        return None
    if "Joint" in name and not hasattr(module, "to_added_qkv"):
        return f"{name} needs text projections, which one attention of the block has not"
    if getattr(module, "inner_kv_dim", None) != getattr(module, "inner_dim", None):
        return f"{name} takes keys and values to be as wide as queries, which they are not here"
    return None


def _restore(owner: nn.Module, name: str, value: Any) -> None:
    if value is _MISSING:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, value)
