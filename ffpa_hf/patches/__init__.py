"""enable, disable and the import hooks: hands a model or a pipeline to the library it belongs to.

Imports neither transformers nor diffusers; the hooks run when those load. Everything here can be undone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import wrapt

from ffpa_hf import settings
from ffpa_hf.backends import Backend
from ffpa_hf.dispatch import Route
from ffpa_hf.patches import attention_classes
from ffpa_hf.report import forget

#: Library -> the module of it whose loading means that its registries exist.
_TRIGGERS = {
    "transformers": "transformers.modeling_utils",
    "diffusers": "diffusers.utils.constants",  # the first to load: it reads DIFFUSERS_ATTN_BACKEND
}
#: What the last `enable` of a model or pipeline asked for, until `disable`.
_options: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_hooked: set[str] = set()
_active = False


def register() -> None:
    """Offer "ffpa" to transformers and diffusers: now where they are loaded, else as soon as they load. Idempotent."""
    global _active
    _active = True
    attention_classes.hook()
    for library, trigger in _TRIGGERS.items():
        if trigger in sys.modules:
            _patch(library).register()
        if library not in _hooked:
            _hooked.add(library)
            if trigger not in sys.modules:
                wrapt.register_post_import_hook(functools.partial(_on_import, library), trigger)


def unregister() -> None:
    """Take "ffpa" out of both libraries again; models that were enabled keep what they have."""
    global _active
    _active = False
    for library, trigger in _TRIGGERS.items():
        if trigger in sys.modules:
            _patch(library).unregister()


def _on_import(library: str, _: Any) -> None:
    if not _active:
        return
    try:
        _patch(library).register()
    except Exception as problem:  # importing transformers or diffusers must not fail for us
        if not settings.silenced():
            warnings.warn(
                f"ffpa_hf could not offer itself to {library} ({type(problem).__name__}: {problem}). The name 'ffpa' "
                f"is missing there, ffpa_hf.ffpa_attn_func works. Does ffpa_hf support this release of {library}?",
                stacklevel=2,
            )


def _patch(library: str) -> Any:
    return importlib.import_module(f"ffpa_hf.patches.{library}")


def _owner(model_or_pipeline: Any) -> Any:
    for library in ("diffusers", "transformers"):
        if library in sys.modules:
            patch = _patch(library)
            if patch.owns(model_or_pipeline):
                return patch
    raise TypeError(
        f"{type(model_or_pipeline).__name__} is neither a transformers model nor a diffusers model or pipeline; "
        "call ffpa_hf.ffpa_attn_func in other modules."
    )


def enable(
    model_or_pipeline: Any,
    *,
    backend: Backend | str | None = None,
    forward_backend: Backend | str | None = None,
    backward_backend: Backend | str | None = None,
    strict: bool = False,
    **more: Any,
) -> Any:
    """Let one transformers model, diffusers model or pipeline compute attention through ffpa_hf; returns it.

    backend, forward_backend, backward_backend: preferences (what they cannot serve goes to the next candidate, which
    `ffpa_hf.report` names), or explicit requests with `strict=True`. Nothing outside the given object changes.

    Raises TypeError for anything else than such a model or pipeline, or for an unknown option.
    """
    route = Route(backend, forward_backend, backward_backend, strict)
    patch = _owner(model_or_pipeline)
    forget(model_or_pipeline)
    patch.enable(model_or_pipeline, route, **more)
    _options[model_or_pipeline] = {
        "backend": backend,
        "forward_backend": forward_backend,
        "backward_backend": backward_backend,
        "strict": strict,
        **more,
    }
    return model_or_pipeline


def disable(model_or_pipeline: Any) -> Any:
    """Undo `enable`: the very objects and settings that were there before; returns the model or pipeline."""
    _owner(model_or_pipeline).disable(model_or_pipeline)
    _options.pop(model_or_pipeline, None)
    forget(model_or_pipeline)
    return model_or_pipeline


@contextlib.contextmanager
def enabled(model_or_pipeline: Any, **options: Any) -> Iterator[Any]:
    """`enable` for the length of a `with` block, undone also after an exception.

    Inside another such block, or after `enable`, what those asked for holds again afterwards.
    """
    before = _options.get(model_or_pipeline)
    try:
        yield enable(model_or_pipeline, **options)
    finally:
        disable(model_or_pipeline)
        if before is not None:
            enable(model_or_pipeline, **before)
