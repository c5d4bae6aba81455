"""Native processors: diffusers' best-known attentions, rewritten so that nothing is copied on the way to the kernel.

Each takes its projections through `ffpa_hf.joint` (QK-norm, rotary embedding and placement in one pass), has V projected
into its place, and returns views. `native_of` gives one only for a processor whose source is exactly what was rewritten;
every other processor, and every call that a native one answers with NotImplemented, goes the generic way.
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
from torch.nn import Linear, Module

from ffpa_hf.joint import Stream, join
from ffpa_hf.masks import RowIntervals
from ffpa_hf.processors.redirect import Caller, from_dispatch, run_for

Tables = tuple[Tensor, Tensor]

# --- modules, and when their weights may be used instead of a call ----------------------------------------------------

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_plain(module: Any, *kinds: str) -> bool:
    """Would calling the module do what its class does and nothing else? Hooks, offloading, adapters say no."""
    kind = type(module)
    return (
        f"{kind.__module__}.{kind.__qualname__}" in kinds
        and "forward" not in module.__dict__
        and not any(module.__dict__[hooks] for hooks in _HOOKS)
        and module.__dict__.get("_compiled_call_impl") is None
        and not torch.nn.modules.module._has_any_global_hook()
    )


def _fits(parameter: Tensor | None, x: Tensor) -> bool:
    """Is it an ordinary weight that meets x without a cast or a move?"""
    if parameter is None:
        return True
    return type(parameter) is torch.nn.Parameter and parameter.dtype == x.dtype and parameter.device == x.device


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _writable(linear: Any, x: Tensor) -> bool:
    """May `x @ weight + bias` be written straight into a buffer in place of calling the module?

    Only for one batch element: its rows of a joint buffer are one dense matrix, as the fastest products want it.
    """
    return (
        x.shape[0] == 1
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(x.device.type)
        and _is_plain(linear, "torch.nn.modules.linear.Linear")
        and _fits(linear.weight, x)
        and _fits(linear.bias, x)
        and not _needs_grad(x, linear.weight, linear.bias)
    )


def _write(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    """out[0] = x[0] @ weight.T + bias."""
    if bias is None:
        torch.mm(x[0], weight.t(), out=out[0])
    else:
        torch.addmm(bias, x[0], weight.t(), out=out[0])


def _rms(norm: Module, x: Tensor, width: int) -> tuple[float, Tensor | None] | None:
    """(eps, weight) of a plain RMS norm over `width` elements, None for any other norm."""
    if _is_plain(norm, "torch.nn.modules.normalization.RMSNorm"):
        shape: Any = norm.normalized_shape
    elif _is_plain(norm, "diffusers.models.normalization.RMSNorm") and norm.bias is None:
        shape = norm.dim
    else:
        return None
    if tuple(shape) != (width,) or norm.eps is None or not _fits(norm.weight, x):
        return None
    return norm.eps, norm.weight  # type: ignore[return-value]


# --- from tokens to attention -----------------------------------------------------------------------------------------


class Source(NamedTuple):
    """Tokens `[B, N, C]` of one stream, what projects them, and what happens to their queries and keys.

    projections: (to_q, to_k, to_v), or one module for all three. norms: of queries and keys, or None. rotary: tables of
    `Stream`, or None.
    """

    tokens: Tensor
    projections: Sequence[Any]
    norms: tuple[Any, Any] = (None, None)
    rotary: Tables | None = None


class _Projected:
    """The projections of one source, each made when it is asked for, so that what was consumed is freed."""

    def __init__(self, source: Source, in_place: bool) -> None:
        self.source, self.in_place = source, in_place
        self.fused = len(source.projections) == 1
        self.parts: Sequence[Tensor] | None = None
        if self.fused:
            linear, x = source.projections[0], source.tokens
            if in_place:  # value will be written where it belongs, so only queries and keys are made here
                self.width = linear.weight.shape[0] // 3
                bias = None if linear.bias is None else linear.bias[: 2 * self.width]
                self.parts = F.linear(x, linear.weight[: 2 * self.width], bias).chunk(2, dim=-1)
            else:
                self.parts = linear(x).chunk(3, dim=-1)
                self.width = self.parts[0].shape[-1]

    def __getitem__(self, index: int) -> Tensor:
        return self.source.projections[index](self.source.tokens) if self.parts is None else self.parts[index]

    def value_into(self, out: Tensor) -> None:
        linear, x = self.source.projections[-1], self.source.tokens
        if self.fused:
            bias = None if linear.bias is None else linear.bias[2 * self.width :]
            _write(linear.weight[2 * self.width :], bias, x, out)
        else:
            _write(linear.weight, linear.bias, x, out)


def _side(
    projected: Sequence[_Projected], index: int, split: tuple[int, int], across_heads: bool, rotary: bool = True
) -> Tensor:
    """Queries (index 0) or keys (1) of all sources, normalised, rotated and end to end: `[B, N, H, D]`."""
    streams = []
    for one in projected:
        norm = one.source.norms[index]
        streams.append(_stream(one[index], norm, split, one.source.rotary if rotary else None, across_heads))
    if len(streams) == 1 and streams[0].eps is None and streams[0].rotary is None:
        return streams[0].heads
    return join(streams, across_heads=across_heads)


def _stream(x: Tensor, norm: Any, split: tuple[int, int], rotary: Tables | None, across_heads: bool) -> Stream:
    heads = x.unflatten(-1, split)
    if norm is None:
        return Stream(heads, rotary=rotary)
    known = _rms(norm, x, x.shape[-1] if across_heads else heads.shape[-1])
    if known is not None:
        return Stream(heads, *known, rotary)
    return Stream(norm(x).unflatten(-1, split) if across_heads else norm(heads), rotary=rotary)


def _value(projected: Sequence[_Projected], split: tuple[int, int]) -> Tensor:
    if len(projected) == 1:
        return projected[0][2].unflatten(-1, split)
    if not projected[0].in_place:
        return torch.cat([one[2] for one in projected], dim=1).unflatten(-1, split)
    lengths = [one.source.tokens.shape[1] for one in projected]
    linear = projected[0].source.projections[-1]
    width = projected[0].width if projected[0].fused else linear.weight.shape[0]
    joint = projected[0].source.tokens.new_empty(1, sum(lengths), width)
    for one, part in zip(projected, joint.split(lengths, dim=1), strict=True):
        one.value_into(part)
    return joint.unflatten(-1, split)


def _attend(caller: Caller, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Tensor:
    """Attention over `[B, N, H, D]`; the result is `[B, N, H * D]`, a view of what the kernel wrote."""
    out = run_for(caller, from_dispatch, (query, key, value, mask), {})
    return out.flatten(2, 3).to(query.dtype)


def _joint(caller: Caller, sources: Sequence[Source], split: tuple[int, int], mask: Any = None) -> Tensor:
    """Attention of all sources together, `[B, N1 + N2, H * D]`."""
    in_place = len(sources) > 1 and all(_writable(source.projections[-1], source.tokens) for source in sources)
    projected = [_Projected(source, in_place) for source in sources]
    query = _side(projected, 0, split, False)
    key = _side(projected, 1, split, False)
    return _attend(caller, query, key, _value(projected, split), mask)


# --- rotary tables in diffusers' conventions --------------------------------------------------------------------------


def _real_tables(embedding: Any, length: int, device: torch.device) -> Tables | None:
    """(cos, sin) `[N, D]`, neighbours paired, as `Stream` takes them; None for anything else."""
    if not isinstance(embedding, (tuple, list)) or len(embedding) != 2:
        return None
    if any(table.dim() != 2 or table.shape[0] != length or table.shape[1] % 2 for table in embedding):
        return None
    cos, sin = (table.to(device).unflatten(-1, (-1, 2))[None] for table in embedding)
    return cos, sin


def _complex_tables(embedding: Any, length: int) -> Tables | None:
    """cos + i sin `[N, D/2]`, one factor for each pair of neighbours."""
    if not isinstance(embedding, Tensor) or embedding.dtype != torch.complex64 or embedding.dim() != 2:
        return None
    if embedding.shape[0] != length:
        return None
    parts = torch.view_as_real(embedding)[None]
    shape = (1, *embedding.shape, 2)
    return parts[..., :1].expand(shape), parts[..., 1:].expand(shape)


def _rows(tables: Tables | None, rows: slice) -> Tables | None:
    return None if tables is None else (tables[0][:, rows], tables[1][:, rows])


def _ordinary(*tensors: Tensor | None) -> bool:
    """Plain dense tokens `[B, N, C]`, all of them; tensor subclasses (sharded, quantised) go the generic way."""
    return all(tensor is None or (type(tensor) is Tensor and tensor.dim() == 3) for tensor in tensors)


def padding_intervals(keep: Tensor) -> RowIntervals:
    """The mask `keep[:, :, None] & keep[:, None, :]` without its N x N: absent rows see nothing and give zeros.

    keep: bool `[B, N]`, tokens that are there.
    """
    end = keep.to(torch.int32) * keep.shape[1]
    return RowIntervals(torch.zeros_like(end), end, key_mask=keep)


# --- the architectures ------------------------------------------------------------------------------------------------


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
    if not _ordinary(hidden_states, encoder_hidden_states):
        return NotImplemented
    if (encoder_hidden_states is None) != (attn.added_kv_proj_dim is None):
        return NotImplemented
    text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
    tables = None
    if image_rotary_emb is not None:
        tables = _real_tables(image_rotary_emb, text + hidden_states.shape[1], hidden_states.device)
        if tables is None:
            return NotImplemented
    fused = attn.fused_projections
    sources = [_image(attn, hidden_states, _rows(tables, slice(text, None)), fused)]
    if encoder_hidden_states is not None:
        sources.insert(0, _text(attn, encoder_hidden_states, _rows(tables, slice(text)), fused))
    if padded and attention_mask is not None and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1:
        attention_mask = padding_intervals(attention_mask[:, 0].diagonal(dim1=-2, dim2=-1).contiguous())
    out = _joint(caller, sources, (-1, attn.head_dim), attention_mask)
    if encoder_hidden_states is None:
        return _project_out(attn, out) if alone else out
    return _project_out(attn, out[:, text:]), attn.to_add_out(out[:, :text])


def _flux2_parallel(
    caller: Caller, attn: Any, hidden_states: Tensor, attention_mask: Any = None, image_rotary_emb: Any = None
) -> Any:
    """Flux 2's single-stream blocks: one projection for queries, keys, values and the feed-forward."""
    if not _ordinary(hidden_states):
        return NotImplemented
    tables = None
    if image_rotary_emb is not None:
        tables = _real_tables(image_rotary_emb, hidden_states.shape[1], hidden_states.device)
        if tables is None:
            return NotImplemented
    projected = attn.to_qkv_mlp_proj(hidden_states)
    own, more = 3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor
    width = projected.shape[-1] * own // (own + more)  # also right where the projection is sharded
    split = (-1, attn.head_dim)
    query, key, value = projected[..., :width].chunk(3, dim=-1)
    query = join([_stream(query, attn.norm_q, split, tables, False)])
    key = join([_stream(key, attn.norm_k, split, tables, False)])
    out = _attend(caller, query, key, value.unflatten(-1, split), attention_mask)
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
    if not _ordinary(hidden_states, encoder_hidden_states):
        return NotImplemented
    batch, image = hidden_states.shape[:2]
    text = encoder_hidden_states.shape[1]
    of_image = of_text = None
    if image_rotary_emb is not None:
        of_image, of_text = (
            _complex_tables(*pair) for pair in zip(image_rotary_emb, (image, text), strict=True)
        )
        if of_image is None or of_text is None:
            return NotImplemented
    mask = None
    if encoder_hidden_states_mask is not None:
        there = torch.ones(batch, image, dtype=torch.bool, device=hidden_states.device)
        mask = torch.cat([encoder_hidden_states_mask, there], dim=1)[:, None, None, :]
    sources = [_text(attn, encoder_hidden_states, of_text), _image(attn, hidden_states, of_image)]
    out = _joint(caller, sources, (-1, attn.inner_dim // attn.heads), mask)
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
    if not _ordinary(hidden_states, encoder_hidden_states) or (fused and encoder_hidden_states is None):
        return NotImplemented
    image = hidden_states.shape[1]
    sources = [_image(attn, hidden_states, fused=fused)]
    if encoder_hidden_states is not None:
        sources.append(_text(attn, encoder_hidden_states, fused=fused))
    if fused:
        sources = [source._replace(norms=(None, None)) for source in sources]
    out = _joint(caller, sources, (attn.heads, -1))
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
    if not _ordinary(hidden_states, encoder_hidden_states):
        return NotImplemented
    if pads and (attention_mask is None or attention_mask.dim() != 2 or encoder_hidden_states is None):
        return NotImplemented
    video = hidden_states.shape[1]
    tables = None
    if image_rotary_emb is not None:
        tables = _real_tables(image_rotary_emb, video, hidden_states.device)
        if tables is None:
            return NotImplemented
    sources = [_image(attn, hidden_states, tables)]
    if encoder_hidden_states is not None:
        separate = pads or attn.add_q_proj is not None
        sources.append(_text(attn, encoder_hidden_states) if separate else _image(attn, encoder_hidden_states))
    if pads:
        missing = sum(source.tokens.shape[1] for source in sources) - attention_mask.shape[1]
        attention_mask = padding_intervals(F.pad(attention_mask, (missing, 0), value=True).bool())
    out = _joint(caller, sources, (attn.heads, -1), attention_mask)
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
    if not _ordinary(hidden_states, encoder_hidden_states):
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
    query = join([_stream(query, attn.norm_q, split, tables, True)], across_heads=True)
    key = join([_stream(key, attn.norm_k, split, tables, True)], across_heads=True)
    out = _attend(caller, query, key, value.unflatten(-1, split), attention_mask)
    if image is not None:
        if fused:
            key, value = attn.to_added_kv(image).chunk(2, dim=-1)
        else:
            key, value = attn.add_k_proj(image), attn.add_v_proj(image)
        key = join([_stream(key, attn.norm_added_k, split, None, True)], across_heads=True)
        out = out + _attend(caller, query, key, value.unflatten(-1, split))
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
    out = _project_out(attn, _attend(caller, query, key, value, mask))
    if residual.dim() == 4:
        out = out.transpose(-1, -2).unflatten(-1, residual.shape[-2:])
        out = residual + out if attn.residual_connection else out.contiguous()
    elif attn.residual_connection:
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
_KNOWN: dict[str, _Known] = {
    f"{_FLUX}.FluxAttnProcessor": _Known(
        functools.partial(_flux, alone=False), (*_helpers(_FLUX, *_PROJECTIONS), _ROTARY), ("a0322ce609c45392",)
    ),
    f"{_FLUX2}.Flux2AttnProcessor": _Known(
        functools.partial(_flux, alone=True), (*_helpers(_FLUX2, *_PROJECTIONS), _ROTARY), ("1ff2167b134f87c3",)
    ),
    f"{_FLUX2}.Flux2ParallelSelfAttnProcessor": _Known(_flux2_parallel, (_ROTARY,), ("3edb161264f4cb0d",)),
    f"{_QWEN}.QwenDoubleStreamAttnProcessor2_0": _Known(_qwen, _helpers(_QWEN, "apply_rotary_emb_qwen"), ("b27d61760287008b",)),
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
        _plain, _helpers(_LEGACY, "Attention.prepare_attention_mask"), ("2e489e9fea676398",)
    ),
    f"{_LEGACY}.FusedAttnProcessor2_0": _Known(
        functools.partial(_plain, fused=True), _helpers(_LEGACY, "Attention.prepare_attention_mask"), ("0eb1fecb0aeb44c5",)
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
    return functools.partial(native, padded=True) if isinstance(native, functools.partial) and native.func is _flux else native


def _found(path: str) -> Any:
    """The function of a dotted path, of a module that is loaded or of a class in it."""
    parent, _, name = path.rpartition(".")
    if parent.rpartition(".")[2][:1].isupper():
        return getattr(_found(parent), name)
    return getattr(importlib.import_module(parent), name)
