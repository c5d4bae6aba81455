"""The signature that `FFPAAttnProcessor.__call__` shows: diffusers' modules hand on only the arguments it names.

Knows names, nothing else. Two costs shape it: diffusers asks for the signature on every attention call, and building
one with 60 parameters takes longer than a small attention; and torch.compile traces what it is given, where it meets a
mappingproxy it may refuse. So the signature is made once and its parameters are a plain dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

#: Every argument that a processor of diffusers 0.42 names after its hidden states (a test compares). Processors of
#: others add theirs when they are captured.
_NAMES = """
    all_perturbed attention_mask attn_mask audio_rotary_emb base_sequence_length batch_flag block_mask
    cache_write_slice cached_txt_key cached_txt_value context context_mask encoder_hidden_states
    encoder_hidden_states_image encoder_hidden_states_mask encoder_position_embeddings freqs_cis gen_seq grid_sizes
    hidden_states hidden_states_masks image_embed_seq_len image_rotary_emb ip_adapter_masks ip_hidden_states
    key_rotary_emb key_valid kv_cache kv_cache_flag kv_cache_mode latent_attn_mask layer_cache loss mask num_ref_tokens
    num_txt_tokens origin_latent_frames origin_latent_hw original_context_length pairs perturbation_mask
    position_embeddings post_attention_mask prompt_rotary_emb query_rotary_emb reference_grid_sizes
    reference_rope_stride reference_rotary_emb rope rope_stride rotary_emb rotary_emb_kv scale segments sink_rotary_emb
    sparse_params temb text_attn_mask timestep
"""
_names: dict[str, None] = dict.fromkeys(_NAMES.split())
_published: list[type] = []


class _Signature(inspect.Signature):
    """A signature whose bound form is ready: inspect asks for it by `replace` with all parameters but the first."""

    __slots__ = ("_bound",)

    def __init__(self, parameters: list[inspect.Parameter], bound: _Signature | None = None) -> None:
        super().__init__(parameters)
        self._parameters = dict(self._parameters)  # type: ignore[has-type]
        self._bound = bound

    def replace(self, *, parameters: Any = inspect.Parameter.empty, **more: Any) -> Any:
        if self._bound is not None and not more and parameters is not inspect.Parameter.empty:
            if len(parameters) == len(self._bound._parameters):
                return self._bound
        if parameters is inspect.Parameter.empty:
            parameters = self._parameters.values()
        return inspect.Signature(list(parameters), **more)


def names(argument: str) -> bool:
    """Does the signature name this argument?"""
    return argument in _names


def publish(processor: type) -> None:
    """Give a processor class this signature, now and when it grows."""
    _published.append(processor)
    _show(processor)


def grow(arguments: Iterable[str]) -> None:
    """Name the arguments of a processor that was captured, too."""
    new = [argument for argument in arguments if argument not in _names and argument not in ("self", "attn")]
    if new:
        _names.update(dict.fromkeys(new))
        for processor in _published:
            _show(processor)


def _show(processor: Any) -> None:
    kind = inspect.Parameter
    first = [kind("self", kind.POSITIONAL_OR_KEYWORD), kind("attn", kind.POSITIONAL_OR_KEYWORD)]
    rest = [
        kind("args", kind.VAR_POSITIONAL),
        *(kind(name, kind.KEYWORD_ONLY, default=None) for name in _names),
        kind("kwargs", kind.VAR_KEYWORD),
    ]
    processor.__call__.__signature__ = _Signature([*first, *rest], _Signature([*first[1:], *rest]))
