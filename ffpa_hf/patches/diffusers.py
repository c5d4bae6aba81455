"""diffusers models and pipelines: enable, disable, and the registrations behind them.

Walks modules and hands them to `ffpa_hf.processors`; computes nothing and imports diffusers only by looking whether it
is loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

from ffpa_hf.dispatch import Route
from ffpa_hf.processors import FFPAAttnProcessor, capture, inline, registry
from ffpa_hf.report import not_accelerated

_AUTOENCODERS = "diffusers.models.autoencoders"


def register() -> None:
    """Offer the "ffpa" backend and `set_attn_processor` to diffusers, loaded already or later. Idempotent."""
    registry.apply()


def unregister() -> None:
    """Undo `register`; models that were enabled stay enabled."""
    registry.undo()


def owns(obj: Any) -> bool:
    """Is this a diffusers pipeline, a diffusers model, or a module (compiled, wrapped) with one inside?"""
    pipeline = _loaded("diffusers.pipelines.pipeline_utils", "DiffusionPipeline")
    if pipeline is not None and isinstance(obj, pipeline):
        return True
    return isinstance(obj, Module) and _is_diffusers_model(obj)


def enable(
    obj: Any,
    route: Route,
    vae: bool = True,
    text_encoders: bool = True,
    *,
    precision: str | None = None,
    skip_layers: Any = None,
    skip_first_steps: int | None = None,
    **more: Any,
) -> None:
    """Accelerate a model, or every transformer, UNet, ControlNet, autoencoder and text encoder of a pipeline.

    vae: also the autoencoders (of a pipeline). text_encoders: also its transformers models. Each model gets one
    FFPAAttnProcessor with `route`, since diffusers writes a model's attention backend and parallelism on it; attention
    written inline is reached too. After an exception nothing is enabled.

    Raises TypeError for an unknown option, NotImplementedError for a precision whose kernels do not exist yet.
    """
    if more:
        known = "backend, forward_backend, backward_backend, strict, vae, text_encoders, precision"
        raise TypeError(f"enable has no option {', '.join(map(repr, more))} for diffusers; it has {known}.")
    if precision is not None:
        if precision not in ("fp8", "fp4", "auto"):
            raise ValueError(f"precision={precision!r} is not allowed; use None, 'fp8', 'fp4' or 'auto'.")
        raise NotImplementedError(f"precision={precision!r}: the quantised kernels are not built yet; use None.")
    if skip_layers is not None or skip_first_steps is not None:
        raise ValueError("skip_layers and skip_first_steps choose where a precision applies; give precision with them.")
    try:
        for model, name in _diffusers_models(obj):
            if vae or not _is_autoencoder(model, name):
                _accelerate(model, _processor(route))
        if text_encoders:
            _enable_text_encoders(obj, route)
    except BaseException:
        disable(obj)
        raise


def disable(obj: Any) -> None:
    """Put back the very processors, classes and text encoder settings that were replaced."""
    for model, _ in _diffusers_models(obj):
        for module in model.modules():
            inline.uninstall_inline(module)
            capture.disable(module)
    transformers = _transformers_patch()
    for model in _transformers_models(obj, transformers):
        for module in model.modules():
            inline.uninstall_inline(module)
        with contextlib.suppress(ValueError):  # it was never enabled
            transformers.disable(model)


def _processor(route: Route) -> FFPAAttnProcessor:
    return FFPAAttnProcessor(route.backend, route.forward_backend, route.backward_backend, route.strict)


def _accelerate(model: Module, owner: FFPAAttnProcessor) -> None:
    for module in model.modules():
        if capture.holds_processor(module):
            capture.enable(module, owner)
        elif inline.has_inline_attention(module):
            inline.install_inline(module, owner)
        elif reason := inline.why_out_of_reach(module):
            not_accelerated(module, reason)


def _enable_text_encoders(obj: Any, route: Route) -> None:
    transformers = _transformers_patch()
    for model in _transformers_models(obj, transformers):
        try:
            transformers.enable(model, route)
        except ValueError as refusal:
            # One encoder that cannot switch is no reason to leave the whole pipeline: its inline attention is reached
            # as an autoencoder's is, and where there is none the report says so.
            inside = [module for module in model.modules() if inline.has_inline_attention(module)]
            owner = _processor(route)
            for module in inside:
                inline.install_inline(module, owner)
            if not inside:
                not_accelerated(model, f"text encoder: {refusal}")


# --- walking ----------------------------------------------------------------------------------------------------------


def _components(obj: Any) -> Iterator[tuple[Module, str]]:
    if isinstance(obj, Module):
        yield obj, ""
        return
    for name, component in obj.components.items():
        if isinstance(component, Module):
            yield component, name


def _diffusers_models(obj: Any) -> Iterator[tuple[Module, str]]:
    return ((module, name) for module, name in _components(obj) if _is_diffusers_model(module))


def _transformers_models(obj: Any, patch: Any) -> Iterator[Module]:
    if patch is None or isinstance(obj, Module):
        return iter(())
    return (module for module, _ in _components(obj) if not _is_diffusers_model(module) and patch.owns(module))


def _is_diffusers_model(module: Module) -> bool:
    kinds = tuple(
        kind
        for kind in (
            _loaded("diffusers.models.modeling_utils", "ModelMixin"),
            _loaded("diffusers.models.attention_processor", "Attention"),
            _loaded("diffusers.models.attention", "AttentionModuleMixin"),
        )
        if kind is not None
    )
    return any(isinstance(child, kinds) for child in module.modules())


def _is_autoencoder(model: Module, name: str) -> bool:
    return (
        type(model).__module__.startswith(_AUTOENCODERS)
        or "vae" in name
        or any(word in name for word in ("movq", "vqgan", "autoencoder"))
    )


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _transformers_patch() -> Any:
    return importlib.import_module("ffpa_hf.patches.transformers") if "transformers" in sys.modules else None
