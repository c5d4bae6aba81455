"""Native processors: diffusers' best-known attentions, rewritten so that nothing is copied on the way to the kernel.

Each takes its projections through `ffpa_hf.joint` (QK-norm, rotary embedding and placement in one pass), has V
projected into its place, and returns views. `native_of` gives one only for a processor whose source is exactly what was
rewritten; every other processor, and every call that a native one answers with NotImplemented, goes the generic way:
also each call without the kernel (on the CPU, with a gradient), unless an N x N mask is saved.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ffpa_hf.joint import join
from ffpa_hf.masks import RowIntervals
from ffpa_hf.processors.projections import (
    Source,
    Tables,
    attend_heads,
    attend_jointly,
    complex_tables,
    ordinary,
    padding_intervals,
    pays,
    real_tables,
    rows_of,
    stream,
)
from ffpa_hf.processors.redirect import Caller


def _image(attn: Any, tokens: Tensor, rotary: Tables | None = None, fused: bool = False) -> Source:
    projections = (attn.to_qkv,) if fused else (attn.to_q, attn.to_k, attn.to_v)
    return Source(tokens, projections, (attn.norm_q, attn.norm_k), rotary)


def _text(attn: Any, tokens: Tensor, rotary: Tables | None = None, fused: bool = False) -> Source:
    projections = (attn.to_added_qkv,) if fused else (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    return Source(tokens, projections, (attn.norm_added_q, attn.norm_added_k), rotary)


def _project_out(attn: Any, hidden_states: Tensor) -> Tensor:
    return attn.to_out[1](attn.to_out[0](hidden_states))


def _flux(
    caller: Caller,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Any = None,
    image_rotary_emb: Any = None,
    *,
    alone: bool,
    padded: bool = False,
) -> Any:
    """Flux and its kin: text before image, one table for both. alone: to_out also where there is no text.

    padded: the mask is known to be `[B, 1, N, N]`, True where both tokens are there (Chroma).
    """
    if not ordinary(hidden_states, encoder_hidden_states) or not (padded or pays(attn, hidden_states)):
        return NotImplemented
    if (encoder_hidden_states is None) != (attn.added_kv_proj_dim is None):
        return NotImplemented
    text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
    tables = None
    if image_rotary_emb is not None:
        tables = real_tables(image_rotary_emb, text + hidden_states.shape[1], hidden_states.device)
        if tables is None:
            return NotImplemented
    fused = attn.fused_projections
    sources = [_image(attn, hidden_states, rows_of(tables, slice(text, None)), fused)]
    if encoder_hidden_states is not None:
        sources.insert(0, _text(attn, encoder_hidden_states, rows_of(tables, slice(text)), fused))
    if padded and attention_mask is not None and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1:
        attention_mask = padding_intervals(attention_mask[:, 0].diagonal(dim1=-2, dim2=-1).contiguous())
    out = attend_jointly(caller, sources, (-1, attn.head_dim), attention_mask)
    if encoder_hidden_states is None:
        return _project_out(attn, out) if alone else out
    return _project_out(attn, out[:, text:]), attn.to_add_out(out[:, :text])


def _flux2_parallel(
    caller: Caller, attn: Any, hidden_states: Tensor, attention_mask: Any = None, image_rotary_emb: Any = None
) -> Any:
    """Flux 2's single-stream blocks: one projection for queries, keys, values and the feed-forward."""
    if not ordinary(hidden_states) or not pays(attn, hidden_states):
        return NotImplemented
    tables = None
    if image_rotary_emb is not None:
        tables = real_tables(image_rotary_emb, hidden_states.shape[1], hidden_states.device)
        if tables is None:
            return NotImplemented
    projected = attn.to_qkv_mlp_proj(hidden_states)
    own, more = 3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor
    width = projected.shape[-1] * own // (own + more)  # also right where the projection is sharded
    split = (-1, attn.head_dim)
    query, key, value = projected[..., :width].chunk(3, dim=-1)
    query = join([stream(query, attn.norm_q, split, tables, False)])
    key = join([stream(key, attn.norm_k, split, tables, False)])
    out = attend_heads(caller, query, key, value.unflatten(-1, split), attention_mask)
    return attn.to_out(torch.cat([out, attn.mlp_act_fn(projected[..., width:])], dim=-1))


def _qwen(
    caller: Caller,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    encoder_hidden_states_mask: Tensor | None = None,
    attention_mask: Any = None,
    image_rotary_emb: Any = None,
) -> Any:
    """QwenImage: text before image, complex tables for each."""
    if encoder_hidden_states is None or attention_mask is not None:
        return NotImplemented
    if not ordinary(hidden_states, encoder_hidden_states) or not pays(attn, hidden_states):
        return NotImplemented
    batch, image = hidden_states.shape[:2]
    text = encoder_hidden_states.shape[1]
    of_image = of_text = None
    if image_rotary_emb is not None:
        of_image, of_text = (complex_tables(*pair) for pair in zip(image_rotary_emb, (image, text), strict=True))
        if of_image is None or of_text is None:
            return NotImplemented
    mask = None
    if encoder_hidden_states_mask is not None:
        there = torch.ones(batch, image, dtype=torch.bool, device=hidden_states.device)
        mask = torch.cat([encoder_hidden_states_mask, there], dim=1)[:, None, None, :]
    sources = [_text(attn, encoder_hidden_states, of_text), _image(attn, hidden_states, of_image)]
    out = attend_jointly(caller, sources, (-1, attn.inner_dim // attn.heads), mask)
    image_out = attn.to_out[0](out[:, text:])
    if len(attn.to_out) > 1:
        image_out = attn.to_out[1](image_out)
    return image_out, attn.to_add_out(out[:, :text])


def _sd3(
    caller: Caller,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Any = None,
    *args: Any,
    fused: bool = False,
    **kwargs: Any,
) -> Any:
    """Stable Diffusion 3: image before text, no positions; the mask is ignored, as diffusers does.

    fused: diffusers' fused processor, which leaves the norms out and always has text.
    """
    if not ordinary(hidden_states, encoder_hidden_states) or (fused and encoder_hidden_states is None):
        return NotImplemented
    if not pays(attn, hidden_states):
        return NotImplemented
    image = hidden_states.shape[1]
    sources = [_image(attn, hidden_states, fused=fused)]
    if encoder_hidden_states is not None:
        sources.append(_text(attn, encoder_hidden_states, fused=fused))
    if fused:
        sources = [source._replace(norms=(None, None)) for source in sources]
    out = attend_jointly(caller, sources, (attn.heads, -1))
    hidden_states = _project_out(attn, out[:, :image])
    if encoder_hidden_states is None:
        return hidden_states
    return hidden_states, out[:, image:] if attn.context_pre_only else attn.to_add_out(out[:, image:])


def _hunyuan_video(
    caller: Caller,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Any = None,
    image_rotary_emb: Any = None,
    *,
    pads: bool = False,
) -> Any:
    """HunyuanVideo: video before text, positions on the video alone; single-stream blocks share their projections.

    pads: the mask `[B, Nt]` says which text tokens are there (HunyuanVideo 1.5); else it goes to attention as it is.
    """
    if not ordinary(hidden_states, encoder_hidden_states) or not (pads or pays(attn, hidden_states)):
        return NotImplemented
    if pads and (attention_mask is None or attention_mask.dim() != 2 or encoder_hidden_states is None):
        return NotImplemented
    video = hidden_states.shape[1]
    tables = None
    if image_rotary_emb is not None:
        tables = real_tables(image_rotary_emb, video, hidden_states.device)
        if tables is None:
            return NotImplemented
    sources = [_image(attn, hidden_states, tables)]
    if encoder_hidden_states is not None:
        separate = pads or attn.add_q_proj is not None
        sources.append(_text(attn, encoder_hidden_states) if separate else _image(attn, encoder_hidden_states))
    if pads:
        missing = sum(source.tokens.shape[1] for source in sources) - attention_mask.shape[1]
        attention_mask = padding_intervals(F.pad(attention_mask, (missing, 0), value=True).bool())
    out = attend_jointly(caller, sources, (attn.heads, -1), attention_mask)
    if encoder_hidden_states is None:
        return out, None
    hidden_states, encoder_hidden_states = out[:, :video], out[:, video:]
    if getattr(attn, "to_out", None) is not None:
        hidden_states = _project_out(attn, hidden_states)
    if getattr(attn, "to_add_out", None) is not None:
        encoder_hidden_states = attn.to_add_out(encoder_hidden_states)
    return hidden_states, encoder_hidden_states


_WAN_TEXT = 512  # tokens of the text encoder; what comes before them is the image's


def _wan(
    caller: Caller,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Any = None,
    rotary_emb: Any = None,
) -> Any:
    """Wan: self or cross attention, the norm over all heads of a token; image-to-video attends to the image apart."""
    if not ordinary(hidden_states, encoder_hidden_states) or not pays(attn, hidden_states):
        return NotImplemented
    tables = None
    if rotary_emb is not None:
        cos, sin = rotary_emb
        length = hidden_states.shape[1]
        if encoder_hidden_states is not None or cos.dim() != 4 or cos.shape != sin.shape:
            return NotImplemented
        if cos.shape[1] != length or cos.shape[2] != 1:
            return NotImplemented
        shape = (*cos.shape[:2], cos.shape[3] // 2, 2)
        tables = cos[:, :, 0, 0::2, None].expand(shape), sin[:, :, 0, 1::2, None].expand(shape)
    image = None
    if attn.add_k_proj is not None:
        if encoder_hidden_states is None:
            return NotImplemented
        before = encoder_hidden_states.shape[1] - _WAN_TEXT
        image, encoder_hidden_states = encoder_hidden_states[:, :before], encoder_hidden_states[:, before:]
    context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    split = (attn.heads, -1)
    fused = getattr(attn, "fused_projections", False)
    if fused and not attn.is_cross_attention:
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    elif fused:
        query = attn.to_q(hidden_states)
        key, value = attn.to_kv(context).chunk(2, dim=-1)
    else:
        query, key, value = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
    query = join([stream(query, attn.norm_q, split, tables, True)], across_heads=True)
    key = join([stream(key, attn.norm_k, split, tables, True)], across_heads=True)
    out = attend_heads(caller, query, key, value.unflatten(-1, split), attention_mask)
    if image is not None:
        if fused:
            key, value = attn.to_added_kv(image).chunk(2, dim=-1)
        else:
            key, value = attn.add_k_proj(image), attn.add_v_proj(image)
        key = join([stream(key, attn.norm_added_k, split, None, True)], across_heads=True)
        out = out + attend_heads(caller, query, key, value.unflatten(-1, split))
    return _project_out(attn, out)


def _plain(
    caller: Caller,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Any = None,
    temb: Tensor | None = None,
    *args: Any,
    fused: bool = False,
    **kwargs: Any,
) -> Any:
    """The attention of UNets and autoencoders: `[B, N, C]` or an image `[B, C, H, W]`, residual and rescaling included.

    attention_mask: as diffusers' modules give it, or a `RowIntervals`.
    """
    if args or kwargs or type(hidden_states) is not Tensor or hidden_states.dim() not in (3, 4):
        return NotImplemented
    residual = hidden_states
    if attn.spatial_norm is not None:
        hidden_states = attn.spatial_norm(hidden_states, temb)
    if residual.dim() == 4:
        hidden_states = hidden_states.flatten(2).transpose(1, 2)
    context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    mask = _mask_by_heads(attn, attention_mask, context.shape[0], context.shape[1])
    if attn.group_norm is not None:
        hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
    # An image's channels are not the innermost dim: each projection would make its own dense copy.
    hidden_states = hidden_states.contiguous()
    context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    if encoder_hidden_states is not None and attn.norm_cross:
        context = attn.norm_encoder_hidden_states(context)
    split = (attn.heads, -1)
    if fused and encoder_hidden_states is None:
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    elif fused:
        query = attn.to_q(hidden_states)
        key, value = attn.to_kv(context).chunk(2, dim=-1)
    else:
        query, key, value = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
    query, key, value = (part.unflatten(-1, split) for part in (query, key, value))
    query = query if attn.norm_q is None else attn.norm_q(query)
    key = key if attn.norm_k is None else attn.norm_k(key)
    out = _project_out(attn, attend_heads(caller, query, key, value, mask))
    if residual.dim() == 4:
        out = out.transpose(-1, -2).reshape(residual.shape)
    if attn.residual_connection:
        out = out + residual
    return out if attn.rescale_output_factor == 1 else out / attn.rescale_output_factor


def _mask_by_heads(attn: Any, mask: Any, batch: int, keys: int) -> Any:
    """A mask of diffusers' modules as attention takes it; one that all heads share is not repeated for each."""
    if mask is None or isinstance(mask, RowIntervals):
        return mask
    if mask.dim() in (2, 3) and mask.shape[0] == batch and mask.shape[-1] == keys:
        return mask[:, None, None] if mask.dim() == 2 else mask[:, None]
    mask = attn.prepare_attention_mask(mask, keys, batch)
    return mask.view(batch, attn.heads, -1, mask.shape[-1])


# --- which processor is which -----------------------------------------------------------------------------------------

Native = Callable[..., Any]
_MODELS = "diffusers.models"
_ROTARY = f"{_MODELS}.embeddings.apply_rotary_emb"
_FLUX = f"{_MODELS}.transformers.transformer_flux"
_FLUX2 = f"{_MODELS}.transformers.transformer_flux2"
_QWEN = f"{_MODELS}.transformers.transformer_qwenimage"
_WAN = f"{_MODELS}.transformers.transformer_wan"
_HUNYUAN = f"{_MODELS}.transformers.transformer_hunyuan_video"
_LEGACY = f"{_MODELS}.attention_processor"


class _Known(NamedTuple):
    """A rewritten processor: what replaces it, whose code it replaces besides the class's, and that code's hash."""

    native: Native
    helpers: tuple[str, ...]
    fingerprints: tuple[str, ...]


def _helpers(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


_PROJECTIONS = ("_get_projections", "_get_fused_projections", "_get_qkv_projections")
_MASK = "Attention.prepare_attention_mask"
_KNOWN: dict[str, _Known] = {
    f"{_FLUX}.FluxAttnProcessor": _Known(
        functools.partial(_flux, alone=False), (*_helpers(_FLUX, *_PROJECTIONS), _ROTARY), ("a0322ce609c45392",)
    ),
    f"{_FLUX2}.Flux2AttnProcessor": _Known(
        functools.partial(_flux, alone=True), (*_helpers(_FLUX2, *_PROJECTIONS), _ROTARY), ("1ff2167b134f87c3",)
    ),
    f"{_FLUX2}.Flux2ParallelSelfAttnProcessor": _Known(_flux2_parallel, (_ROTARY,), ("3edb161264f4cb0d",)),
    f"{_QWEN}.QwenDoubleStreamAttnProcessor2_0": _Known(
        _qwen, _helpers(_QWEN, "apply_rotary_emb_qwen"), ("b27d61760287008b",)
    ),
    f"{_WAN}.WanAttnProcessor": _Known(
        _wan, _helpers(_WAN, "_get_qkv_projections", "_get_added_kv_projections"), ("937391099a933e2b",)
    ),
    f"{_HUNYUAN}.HunyuanVideoAttnProcessor2_0": _Known(_hunyuan_video, (_ROTARY,), ("777ac44c43238b61",)),
    f"{_HUNYUAN}15.HunyuanVideo15AttnProcessor2_0": _Known(
        functools.partial(_hunyuan_video, pads=True), (_ROTARY,), ("7932464e2dedfd96",)
    ),
    f"{_LEGACY}.JointAttnProcessor2_0": _Known(_sd3, (), ("392b6bf56c8505d1",)),
    f"{_LEGACY}.FusedJointAttnProcessor2_0": _Known(functools.partial(_sd3, fused=True), (), ("38ab0a3e81c938e3",)),
    f"{_LEGACY}.AttnProcessor2_0": _Known(
        _plain, _helpers(_LEGACY, _MASK), ("2e489e9fea676398",)
    ),
    f"{_LEGACY}.FusedAttnProcessor2_0": _Known(
        functools.partial(_plain, fused=True), _helpers(_LEGACY, _MASK), ("0eb1fecb0aeb44c5",)
    ),
}  # fmt: skip


@functools.lru_cache(maxsize=256)
def native_of(kind: type) -> Native | None:
    """What stands for a processor class natively: called with (caller, attn, *the processor's own arguments).

    It answers NotImplemented, before it has computed anything, for a call that it does not know. None where the class
    is not one of those rewritten here, or its source is not the one that was.
    """
    known = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
    if known is None or fingerprint(kind, known.helpers) not in known.fingerprints:
        return None
    return known.native


def fingerprint(kind: type, helpers: Sequence[str]) -> str | None:
    """Hash of a processor's code and its helpers'; None where the source cannot be read."""
    digest = hashlib.sha256()
    try:
        for function in (kind.__call__, *map(_found, helpers)):
            digest.update(inspect.getsource(function).encode())
    except (OSError, TypeError, AttributeError, ImportError):
        return None
    return digest.hexdigest()[:16]


def for_padded(native: Native | None) -> Native | None:
    """The form of Flux's native processor for modules whose mask says which tokens are there."""
    return (
        functools.partial(native, padded=True)
        if isinstance(native, functools.partial) and native.func is _flux
        else native
    )


def _found(path: str) -> Any:
    """The function of a dotted path, of a module that is loaded or of a class in it."""
    parent, _, name = path.rpartition(".")
    if parent.rpartition(".")[2][:1].isupper():
        return getattr(_found(parent), name)
    return getattr(importlib.import_module(parent), name)
