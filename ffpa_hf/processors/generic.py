"""`FFPAAttnProcessor`: one instance for every attention module of every diffusers model.

It re-runs the processor that a module had before (kept on the module by `capture`) with the attention call redirected,
so it knows no architecture; `native` has rewritten the best-known ones, and they come first. It holds a route and no
state of any module, and does not import diffusers.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ffpa_hf.backends import Backend
from ffpa_hf.dispatch import Route
from ffpa_hf.masks import RowIntervals
from ffpa_hf.processors import redirect, signature
from ffpa_hf.processors.capture import Slot, adopt, run_sdpa, slot_of
from ffpa_hf.processors.parallel import is_context_parallel
from ffpa_hf.processors.redirect import Redirect, run_for

logger = logging.getLogger("ffpa_hf")

#: Arguments that diffusers itself drops without a word where a processor does not name them.
_QUIET = frozenset({"ip_adapter_masks", "ip_hidden_states"})


class FFPAAttnProcessor:
    """Attention processor for diffusers: the module's own computation, with attention done by ffpa_hf.

        pipe.transformer.set_attn_processor(FFPAAttnProcessor())

    backend, forward_backend, backward_backend: a name or config per direction; preferences (what one cannot serve goes
    to the next candidate, `ffpa_hf.report(model)` tells), or explicit requests with strict=True.

    Setting it keeps the processor that was there, on the module; setting another processor, or `ffpa_hf.disable`,
    takes it away again. Processors that compute no softmax attention, that are pinned to flex attention, or that hold
    weights of their own (IP-Adapter) stay in place; of these the last are accelerated where they stand.

    Raises ValueError or TypeError for a backend that does not exist.
    """

    # diffusers writes these two on whatever processor has them: set_attention_backend and enable_parallelism.
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(
        self,
        backend: Backend | str | None = None,
        forward_backend: Backend | str | None = None,
        backward_backend: Backend | str | None = None,
        strict: bool = False,
    ) -> None:
        self.route = Route(backend, forward_backend, backward_backend, strict)

    def __repr__(self) -> str:
        route = self.route
        given = {
            "backend": route.backend,
            "forward_backend": route.forward_backend,
            "backward_backend": route.backward_backend,
        }
        words = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return f"FFPAAttnProcessor({', '.join(words + ['strict=True'] * route.strict)})"

    def __call__(self, attn: Module, *args: Any, **kwargs: Any) -> Any:
        slot = slot_of(attn)
        if slot is None:
            slot = adopt(attn, self)
        if not slot.accepts.issuperset(kwargs):
            kwargs = _without_strangers(slot, kwargs)
        if slot.native is not None and self._alone(slot):
            out = slot.native((self.route, attn, None), attn, *args, **kwargs)
            if out is not NotImplemented:
                return out
        mask = kwargs.get("attention_mask")
        if isinstance(mask, RowIntervals):  # made for a native processor, which does not take this call after all
            kwargs = {**kwargs, "attention_mask": _dense(mask, args, kwargs)}
        return self._run(slot, attn, (attn, *args), kwargs)

    def _alone(self, slot: Slot) -> bool:
        """Does nobody else have a say: no other backend of diffusers', no split of the sequence?"""
        if self._attention_backend is not None and self._attention_backend != "ffpa":
            return False
        theirs = slot.inner._parallel_config if slot.takes_parallel_config else None
        return not is_context_parallel(self._parallel_config) and not is_context_parallel(theirs)

    def _run(self, slot: Slot, attn: Module, args: Any, kwargs: Any) -> Any:
        chosen = self._attention_backend
        if chosen is not None and chosen != "ffpa":  # model.set_attention_backend asked for somebody else's kernel
            function = slot.function if slot.worker is None else self._prepared(slot, chosen)
            return function(*args, **kwargs)
        if slot.worker is None or not redirect.backend_registered:
            if is_context_parallel(self._parallel_config):
                raise NotImplementedError(
                    f"context parallelism with {slot.class_name}, which does not use diffusers' attention dispatcher: "
                    "each rank would attend to its own part of the sequence only. (If this model is not split and only "
                    "shares its FFPAAttnProcessor with one that is, give each model its own instance.)"
                )
            return run_sdpa(slot, self.route, attn, args, kwargs)
        worker, caller = self._prepared(slot, slot.backend), (self.route, attn, None)
        if slot.needs_mode:
            with Redirect(self.route, attn):
                return run_for(caller, worker, args, kwargs)
        return run_for(caller, worker, args, kwargs)

    def _prepared(self, slot: Slot, backend: Any) -> Any:
        """The slot's worker, told which backend to name and whether the model is split (before or after us)."""
        worker = slot.worker
        if worker._attention_backend != backend:
            worker._attention_backend = backend
        if slot.takes_parallel_config:
            parallel = self._parallel_config if self._parallel_config is not None else slot.inner._parallel_config
            if worker._parallel_config is not parallel:
                worker._parallel_config = parallel
        return worker


def _dense(mask: RowIntervals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """0 and -inf, `[B, N, N]`, as diffusers' own modules make a mask of their tokens `[B, N, C]`."""
    tokens = args[0] if args else kwargs["hidden_states"]
    keep = mask.dense(tokens.shape[1])[:, 0]
    zeros = torch.zeros(keep.shape, dtype=tokens.dtype, device=keep.device)
    return zeros.masked_fill_(~keep, -torch.inf).expand(tokens.shape[0], -1, -1)


_ignored: set[tuple[str, str]] = set()


def _without_strangers(slot: Slot, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop what only our signature names, as diffusers' modules drop what a processor's signature does not name."""
    kept = {}
    for name, value in kwargs.items():
        if name in slot.accepts or not signature.names(name):
            kept[name] = value
        elif value is not None and name not in _QUIET and not torch.compiler.is_compiling():
            if (slot.class_name, name) not in _ignored:  # once: a sampler calls each module at every step
                _ignored.add((slot.class_name, name))
                logger.warning("%s does not take %s; it is ignored, as diffusers does.", slot.class_name, name)
    return kept


signature.publish(FFPAAttnProcessor)
