"""`FFPAAttnProcessor`: one instance for every attention module of every diffusers model.

It re-runs the processor that a module had before (kept on the module by `capture`) with the attention call redirected,
so it knows no architecture. It holds a route and no state of any module, and does not import diffusers.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn import Module

from ffpa_hf.backends import Backend
from ffpa_hf.dispatch import Route
from ffpa_hf.processors import redirect
from ffpa_hf.processors.capture import Slot, adopt, slot_of
from ffpa_hf.processors.parallel import is_context_parallel
from ffpa_hf.processors.redirect import Redirect, run_with_backend

logger = logging.getLogger("ffpa_hf")

#: Arguments that diffusers itself drops without a word where a processor does not name them.
_QUIET = frozenset({"ip_adapter_masks", "ip_hidden_states"})


class _NotGiven:
    def __repr__(self) -> str:
        return "not given"


_NOT_GIVEN: Any = _NotGiven()


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

    # diffusers' modules hand on only what this signature names, and a signature made at run time does not survive
    # torch.compile: so every name that a processor of diffusers has is spelled out here (a test compares).
    def __call__(
        self,
        attn: Module,
        hidden_states: Any = _NOT_GIVEN,
        *args: Any,
        all_perturbed: Any = _NOT_GIVEN,
        attention_mask: Any = _NOT_GIVEN,
        attn_mask: Any = _NOT_GIVEN,
        audio_rotary_emb: Any = _NOT_GIVEN,
        base_sequence_length: Any = _NOT_GIVEN,
        batch_flag: Any = _NOT_GIVEN,
        block_mask: Any = _NOT_GIVEN,
        cache_write_slice: Any = _NOT_GIVEN,
        cached_txt_key: Any = _NOT_GIVEN,
        cached_txt_value: Any = _NOT_GIVEN,
        context: Any = _NOT_GIVEN,
        context_mask: Any = _NOT_GIVEN,
        encoder_hidden_states: Any = _NOT_GIVEN,
        encoder_hidden_states_image: Any = _NOT_GIVEN,
        encoder_hidden_states_mask: Any = _NOT_GIVEN,
        encoder_position_embeddings: Any = _NOT_GIVEN,
        freqs_cis: Any = _NOT_GIVEN,
        gen_seq: Any = _NOT_GIVEN,
        grid_sizes: Any = _NOT_GIVEN,
        hidden_states_masks: Any = _NOT_GIVEN,
        image_embed_seq_len: Any = _NOT_GIVEN,
        image_rotary_emb: Any = _NOT_GIVEN,
        ip_adapter_masks: Any = _NOT_GIVEN,
        ip_hidden_states: Any = _NOT_GIVEN,
        key_rotary_emb: Any = _NOT_GIVEN,
        key_valid: Any = _NOT_GIVEN,
        kv_cache: Any = _NOT_GIVEN,
        kv_cache_flag: Any = _NOT_GIVEN,
        kv_cache_mode: Any = _NOT_GIVEN,
        latent_attn_mask: Any = _NOT_GIVEN,
        layer_cache: Any = _NOT_GIVEN,
        loss: Any = _NOT_GIVEN,
        mask: Any = _NOT_GIVEN,
        num_ref_tokens: Any = _NOT_GIVEN,
        num_txt_tokens: Any = _NOT_GIVEN,
        origin_latent_frames: Any = _NOT_GIVEN,
        origin_latent_hw: Any = _NOT_GIVEN,
        original_context_length: Any = _NOT_GIVEN,
        pairs: Any = _NOT_GIVEN,
        perturbation_mask: Any = _NOT_GIVEN,
        position_embeddings: Any = _NOT_GIVEN,
        post_attention_mask: Any = _NOT_GIVEN,
        prompt_rotary_emb: Any = _NOT_GIVEN,
        query_rotary_emb: Any = _NOT_GIVEN,
        reference_grid_sizes: Any = _NOT_GIVEN,
        reference_rope_stride: Any = _NOT_GIVEN,
        reference_rotary_emb: Any = _NOT_GIVEN,
        rope: Any = _NOT_GIVEN,
        rope_stride: Any = _NOT_GIVEN,
        rotary_emb: Any = _NOT_GIVEN,
        rotary_emb_kv: Any = _NOT_GIVEN,
        scale: Any = _NOT_GIVEN,
        segments: Any = _NOT_GIVEN,
        sink_rotary_emb: Any = _NOT_GIVEN,
        sparse_params: Any = _NOT_GIVEN,
        temb: Any = _NOT_GIVEN,
        text_attn_mask: Any = _NOT_GIVEN,
        timestep: Any = _NOT_GIVEN,
        **others: Any,
    ) -> Any:
        slot = slot_of(attn)
        if slot is None:
            slot = adopt(attn, self)
        named = {
            "all_perturbed": all_perturbed,
            "attention_mask": attention_mask,
            "attn_mask": attn_mask,
            "audio_rotary_emb": audio_rotary_emb,
            "base_sequence_length": base_sequence_length,
            "batch_flag": batch_flag,
            "block_mask": block_mask,
            "cache_write_slice": cache_write_slice,
            "cached_txt_key": cached_txt_key,
            "cached_txt_value": cached_txt_value,
            "context": context,
            "context_mask": context_mask,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_hidden_states_image": encoder_hidden_states_image,
            "encoder_hidden_states_mask": encoder_hidden_states_mask,
            "encoder_position_embeddings": encoder_position_embeddings,
            "freqs_cis": freqs_cis,
            "gen_seq": gen_seq,
            "grid_sizes": grid_sizes,
            "hidden_states_masks": hidden_states_masks,
            "image_embed_seq_len": image_embed_seq_len,
            "image_rotary_emb": image_rotary_emb,
            "ip_adapter_masks": ip_adapter_masks,
            "ip_hidden_states": ip_hidden_states,
            "key_rotary_emb": key_rotary_emb,
            "key_valid": key_valid,
            "kv_cache": kv_cache,
            "kv_cache_flag": kv_cache_flag,
            "kv_cache_mode": kv_cache_mode,
            "latent_attn_mask": latent_attn_mask,
            "layer_cache": layer_cache,
            "loss": loss,
            "mask": mask,
            "num_ref_tokens": num_ref_tokens,
            "num_txt_tokens": num_txt_tokens,
            "origin_latent_frames": origin_latent_frames,
            "origin_latent_hw": origin_latent_hw,
            "original_context_length": original_context_length,
            "pairs": pairs,
            "perturbation_mask": perturbation_mask,
            "position_embeddings": position_embeddings,
            "post_attention_mask": post_attention_mask,
            "prompt_rotary_emb": prompt_rotary_emb,
            "query_rotary_emb": query_rotary_emb,
            "reference_grid_sizes": reference_grid_sizes,
            "reference_rope_stride": reference_rope_stride,
            "reference_rotary_emb": reference_rotary_emb,
            "rope": rope,
            "rope_stride": rope_stride,
            "rotary_emb": rotary_emb,
            "rotary_emb_kv": rotary_emb_kv,
            "scale": scale,
            "segments": segments,
            "sink_rotary_emb": sink_rotary_emb,
            "sparse_params": sparse_params,
            "temb": temb,
            "text_attn_mask": text_attn_mask,
            "timestep": timestep,
        }
        for name, value in named.items():
            if value is _NOT_GIVEN:
                continue
            if name in slot.accepts:
                others[name] = value
            elif value is not None and name not in _QUIET and not torch.compiler.is_compiling():
                logger.warning("%s does not take %s; it is ignored, as diffusers does.", slot.class_name, name)
        if hidden_states is not _NOT_GIVEN:
            args = (hidden_states, *args)
        return self._run(slot, attn, (attn, *args), others)

    def _run(self, slot: Slot, attn: Module, args: Any, kwargs: Any) -> Any:
        if slot.worker is None or not redirect.backend_registered:
            if is_context_parallel(self._parallel_config):
                raise NotImplementedError(
                    f"context parallelism with {slot.class_name}, which does not use diffusers' attention dispatcher: "
                    "each rank would attend to its own part of the sequence only."
                )
            with Redirect(self.route, attn, slot.scale):
                return slot.function(*args, **kwargs)
        worker, backend = slot.worker, self._attention_backend or slot.backend
        if worker._attention_backend != backend:
            worker._attention_backend = backend
        if slot.takes_parallel_config:  # enable_parallelism came after us, or before
            parallel = self._parallel_config if self._parallel_config is not None else slot.inner._parallel_config
            if worker._parallel_config is not parallel:
                worker._parallel_config = parallel
        if slot.needs_mode:
            with Redirect(self.route, attn, slot.scale):
                return run_with_backend(self.route, attn, worker, args, kwargs)
        return run_with_backend(self.route, attn, worker, args, kwargs)
