"""diffusers models and pipelines: enable, disable, and the registrations behind them.

Walks modules and hands them to `ffpa_hf.processors`; computes nothing and imports diffusers only by looking whether it
is loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module

from ffpa_hf.dispatch import Route
from ffpa_hf.processors import FFPAAttnProcessor, capture, fusing, inline, mask_sources, registry
from ffpa_hf.processors import precision as precisions
from ffpa_hf.processors.redirect import Lowered
from ffpa_hf.report import add_describer, not_accelerated

_AUTOENCODERS = "diffusers.models.autoencoders"


def register() -> None:
    """Offer the "ffpa" backend and `set_attn_processor` to diffusers, loaded already or later. Idempotent."""
    registry.apply()
    add_describer(describe)


def describe(module: Module) -> str | None:
    """What stands on an attention module of diffusers, in words; None where it is no such module."""
    slot = capture.slot_of(module)
    if slot is not None:
        return f"accelerated ({capture.how_served(slot)}), not called yet"
    if not capture.holds_processor(module):
        return "not accelerated: attention inside forward" if _has_inline(module) else None
    if not _of_diffusers(module):
        return None
    if capture.is_ours(module.processor):
        return "accelerated, not called yet"
    if registry.names_our_backend(module.processor):
        return 'accelerated by set_attention_backend("ffpa"), whose calls report() counts without a module'
    return f"not accelerated: {type(module.processor).__name__} was not replaced"


def _has_inline(module: Module) -> bool:
    return _of_diffusers(module) and inline.has_inline_attention(module)


def _of_diffusers(module: Module) -> bool:
    return type(module).__module__.startswith("diffusers.")


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
    fuse_qkv: bool = False,
    vae_attention_dtype: torch.dtype | None = None,
    precision: str | None = None,
    skip_layers: Sequence[str | int] | None = None,
    skip_first_steps: int | None = None,
    **more: Any,
) -> None:
    """Accelerate a model, or every transformer, UNet, ControlNet, autoencoder and text encoder of a pipeline.

    vae: also the autoencoders (of a pipeline). text_encoders: also its transformers models. Each model gets one
    FFPAAttnProcessor with `route`, since diffusers writes a model's attention backend and parallelism on it; attention
    written inline is reached too. After an exception nothing is enabled.

    fuse_qkv: fuse the query, key and value projections of the models that diffusers can fuse; `disable` parts them.

    vae_attention_dtype: torch.bfloat16 or torch.float16: autoencoders that compute in float32, as SDXL's does in a
    float16 pipeline, have their attention, and nothing else, computed in that dtype, which kernels take.

    precision: "fp8" or "fp4" asks for the quantised CUDA kernels, "auto" for FP8 from `precision.LONG` keys on, None
    leaves the inputs' dtype. It applies to the denoising models of a pipeline (to any single model). skip_layers: names
    or indices of attention modules that keep the inputs' dtype (`precision.skipped` says how they are read).
    skip_first_steps: so many steps of the pipeline's scheduler are run in the inputs' dtype; counted from zero at each
    `set_timesteps`.

    Raises TypeError for an unknown option, ValueError for one that means nothing here (skip_layers that match nothing,
    skip_first_steps without a scheduler, fuse_qkv where fused projections would be wrong), NotImplementedError for a
    precision whose kernels do not exist yet, RuntimeError for one whose kernels are not qualified on the present GPU.
    """
    if more:
        known = (
            "backend, forward_backend, backward_backend, strict, vae, text_encoders, fuse_qkv, vae_attention_dtype, "
            "precision, skip_layers, skip_first_steps"
        )
        raise TypeError(f"enable has no option {', '.join(map(repr, more))} for diffusers; it has {known}.")
    precisions.check(precision, skip_layers, skip_first_steps)
    if vae_attention_dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(
            f"vae_attention_dtype={vae_attention_dtype!r} is not allowed; use None, torch.bfloat16 or torch.float16."
        )
    models = [(model, name) for model, name in _diffusers_models(obj) if vae or not _is_autoencoder(model, name)]
    make = _quantising(obj, models, route, precision, skip_layers, skip_first_steps)
    try:
        for model, name in models:
            if fuse_qkv:
                fusing.fuse(model)
            owners = make(model, name)
            if vae_attention_dtype is not None and _is_autoencoder(model, name):
                _lower(owners, vae_attention_dtype)
            _accelerate(model, *owners)
        if text_encoders:
            _enable_text_encoders(obj, route)
    except BaseException:
        disable(obj)
        raise


def disable(obj: Any) -> None:
    """Put back the very processors, classes, projections and text encoder settings that were replaced."""
    for model, _ in _diffusers_models(obj):
        for module in model.modules():
            inline.uninstall_inline(module)
            capture.disable(module)
        fusing.unfuse(model)
    if (scheduler := getattr(obj, "scheduler", None)) is not None:
        precisions.stop_counting(scheduler)
    transformers = _transformers_patch()
    for model in _transformers_models(obj, transformers):
        for module in model.modules():
            inline.uninstall_inline(module)
        with contextlib.suppress(ValueError):  # it was never enabled
            transformers.disable(model)


_Owners = tuple[FFPAAttnProcessor, FFPAAttnProcessor, frozenset[str]]


def _quantising(
    obj: Any,
    models: list[tuple[Module, str]],
    route: Route,
    precision: str | None,
    skip_layers: Sequence[str | int] | None,
    skip_first_steps: int | None,
) -> Callable[[Module, str], _Owners]:
    """Who answers in a model: a plain owner, one for the rest, and the names of the modules that are the first's."""
    if precision is None:
        return lambda model, name: (plain := _processor(route), plain, frozenset())
    quantised, steps = precisions.quantised_route(precision, route), None
    denoising = {
        model: tuple(_attention_names(model))
        for model, name in models
        if isinstance(obj, Module) or not _is_autoencoder(model, name)
    }
    where = [(names, name) for model, name in models if (names := denoising.get(model)) is not None]
    if strangers := precisions.unmatched(where, skip_layers):
        some = next((names[0] for names, _ in where if names), "none")
        raise ValueError(f"skip_layers: {strangers} match no attention module; one is called {some!r}.")
    if skip_first_steps:
        scheduler = getattr(obj, "scheduler", None)
        if not hasattr(scheduler, "set_timesteps") or not hasattr(scheduler, "step"):
            raise ValueError(
                f"skip_first_steps={skip_first_steps} counts the steps of a pipeline's scheduler; "
                f"{type(obj).__name__} has none."
            )
        steps = precisions.Steps(skip_first_steps)
        precisions.count_steps(scheduler, steps)

    def make(model: Module, name: str) -> _Owners:
        plain = _processor(route)
        if model not in denoising:
            return plain, plain, frozenset()
        skip = precisions.skipped(denoising[model], skip_layers, name)
        return plain, precisions.QuantisedProcessor(route, quantised, steps), frozenset(skip)

    return make


def _lower(owners: _Owners, dtype: torch.dtype) -> None:
    if any(isinstance(owner, precisions.QuantisedProcessor) for owner in owners[:2]):
        raise ValueError("vae_attention_dtype and precision were both given for one autoencoder; give one.")
    for owner in owners[:2]:
        route = owner.route
        owner.route = Lowered(route.backend, route.forward_backend, route.backward_backend, route.strict, dtype)


def _attention_names(model: Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if capture.holds_processor(module) or inline.has_inline_attention(module):
            yield name


def _processor(route: Route) -> FFPAAttnProcessor:
    return FFPAAttnProcessor(route.backend, route.forward_backend, route.backward_backend, route.strict)


def _accelerate(model: Module, plain: FFPAAttnProcessor, others: FFPAAttnProcessor, skip: frozenset[str]) -> None:
    for name, module in model.named_modules():
        owner = plain if name in skip else others
        if capture.holds_processor(module):
            capture.enable(module, owner)
        elif inline.has_inline_attention(module):
            inline.install_inline(module, owner)
        elif mask_sources.builds_frame_mask(module):
            mask_sources.install_frame_mask(module, owner)
        elif reason := inline.why_out_of_reach(module):
            not_accelerated(module, reason)
    for module in model.modules():  # once their attention is ours
        mask_sources.note_padding(module)


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
