"""What transformers calls for attn_implementation="ffpa": the mask function and the attention function.

Knows transformers' calling conventions and our `attend`; imports no transformers when loaded, no kernel and no backend.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from ffpa_hf import settings
from ffpa_hf.dispatch import Route
from ffpa_hf.functional import attend
from ffpa_hf.masks import RowIntervals
from ffpa_hf.patches.attention_classes import NAME
from ffpa_hf.patches.interval_mask import IntervalMask, unwrap
from ffpa_hf.patches.mask_recognition import build_mask

_AUTO = Route()


# --- masks ------------------------------------------------------------------------------------------------------------


def ffpa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' mask function for "ffpa": the mask as intervals where rows are runs of keys, else dense bool.

    attention_mask: the 2-D padding mask `[B, seen]` or None; it becomes the key mask, unread. Never returns None, so
    that no alignment has to be guessed later. Models that read their mask themselves get the form they understand.
    """
    if not torch.compiler.is_compiling():
        _warn_of_foreign_attention(config)
    form = _mask_form(config)
    if form != "intervals":
        from transformers.masking_utils import eager_mask, sdpa_mask

        dense: Callable[..., Any] = eager_mask if form == "float" else sdpa_mask
        return dense(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            device=device,
            **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )
    return build_mask(
        mask_function,
        batch=batch_size,
        q_len=q_length,
        kv_len=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        padding=attention_mask,
        use_vmap=use_vmap,
        device=torch.device(device),
        model_type=getattr(config, "model_type", ""),
    )


#: Model types that dispatch (or share a file with models that do) and still compute with an additive mask.
_ADDITIVE = frozenset({"blip_text_model", "deepseek_v4", "git"})

_Form = Literal["intervals", "float", "bool"]


def _warn_of_foreign_attention(config: Any) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(config, "_attn_implementation", None) or NAME
    if ALL_ATTENTION_FUNCTIONS.get(name) is not ffpa_attention_forward:
        _warn_once(
            "foreign attention",
            f'attn_implementation="{name}" builds the masks of ffpa_hf, but another package has registered its own '
            "attention under that name. ffpa_hf.register() puts ours back.",
        )


def _mask_form(config: Any) -> _Form:
    """Which mask the model behind a config can read."""
    return "intervals" if config is None else _form_of(type(config), getattr(config, "model_type", ""))


def _form_of(config_class: type, model_type: str) -> _Form:
    if model_type in _ADDITIVE:
        return "float"
    module = _modeling_module(config_class)
    if module is None:  # a model from elsewhere: an IntervalMask refuses to be added to scores
        return "intervals"
    if model_type == "gemma4_audio":  # its own chunked attention; which mask it takes changed between releases
        convert = getattr(module.Gemma4AudioModel, "_convert_4d_mask_to_blocked_5d", None)
        return "float" if convert is not None and "finfo" in convert.__code__.co_names else "bool"
    return "intervals" if hasattr(module, "ALL_ATTENTION_FUNCTIONS") else "float"


def _modeling_module(config_class: type) -> Any:
    package, _, name = config_class.__module__.rpartition(".")
    return sys.modules.get(f"{package}.{name.replace('configuration_', 'modeling_', 1)}") if package else None


# --- attention --------------------------------------------------------------------------------------------------------


def ffpa_attention_forward(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function for "ffpa".

    Args:
        query, key, value: `[B, Hq, Q, D]`, `[B, Hkv, K, D]`, `[B, Hkv, K, Dv]`, any strides; heads group by their
            counts.
        attention_mask: None; an `IntervalMask`; bool (True keeps) or float (added) `[B or 1, Hq or 1, Q, K]`. With None
            the layer is causal, top-left aligned, exactly where it is under "sdpa".
        scaling: factor of the scores; None means 1 / sqrt(D).
        sliding_window: already part of the mask; used where none was built.
        softcap, s_aux or sinks `[Hq]` or, for each query, `[B or 1, Hq, Q, 1]`, position_bias `[B or 1, Hq, Q, K]`:
            honoured, the last two with gradients.
        indices `[B, Q, k]`, block_indices `[B, groups, Q, k]`: the keys, or blocks of keys, that a row may see at all.
        cu_seq_lens_q, cu_seq_lens_k: int32 `[documents + 1]`, documents packed into a batch of one; no document sees
            another.

    Returns:
        out `[B, Q, Hq, Dv]`, contiguous, and None for the weights.

    Raises NotImplementedError or ValueError for what cannot be honoured, RuntimeError where no mask arrived because the
    mask function of "ffpa" is not registered; nothing that changes the result is ignored.
    """
    _refuse_and_warn(module, kwargs)
    if attention_mask is None:
        _require_our_masks(module)
    query, key, value = _one_dtype(module, query, key, value)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if indices is not None and cu_seq_lens_q is not None:
        _refuse_unless_packed(attention_mask, module)
    if block_indices is not None:
        _refuse_packed(attention_mask, cu_seq_lens_q, module)
    mask = _Mask.read(attention_mask, query, key.shape[2], causal)
    if attention_mask is None and sliding_window is not None:
        mask.slide(sliding_window, causal)
    if cu_seq_lens_q is not None and (causal or _reads_text(module, query.shape[2], key.shape[2])):
        mask.separate(cu_seq_lens_q, cu_seq_lens_k, query.shape[0], _chunk_size(module))
    if indices is not None:
        mask.select(_chosen(indices, key.shape[2])[:, None])
    if block_indices is not None:
        mask.select(_chosen_blocks(module, block_indices, query.shape[1], key.shape[2]))
    if position_bias is not None:
        mask.add(position_bias, query.dtype)
    sinks = s_aux if s_aux is not None else sinks
    each_query = sinks is not None and sinks.dim() == 4 and tuple(sinks.shape[1:]) == (*query.shape[1:3], 1)
    out = attend(
        query,
        key,
        value,
        attn_mask=mask.argument(),
        dropout_p=dropout,
        is_causal=mask.causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        softcap=softcap,
        sinks=None if each_query else _sinks(sinks, query.shape[1]),
        return_lse=each_query,
        route=getattr(module, "_ffpa_route", _AUTO),
        site=module,
    )
    if each_query:  # a sink takes its share of what the keys would have had: exp(lse) / (exp(lse) + exp(sink))
        out, lse = out
        out = out * torch.sigmoid(lse[..., None] - sinks).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


@dataclass
class _Mask:
    """The mask of one call while its parts come together: plain causal, or intervals, or a tensor, or nothing."""

    q_len: int
    kv_len: int
    device: torch.device
    causal: bool = False
    rows: RowIntervals | None = None
    tensor: Tensor | None = None  # bool or additive

    @classmethod
    def read(cls, mask: Tensor | None, query: Tensor, kv_len: int, causal: bool) -> _Mask:
        """Sort what the model handed over. Without a mask, causality follows the rule of transformers' "sdpa"."""
        q_len = query.shape[2]
        made = cls(q_len, kv_len, query.device)
        if mask is None:
            made.causal = bool(causal) and q_len > 1
            return made
        if mask.dim() != 4:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)} at the attention; [B or 1, Hq or 1, Q, K] is needed."
            )
        if not isinstance(mask, IntervalMask):  # of a user's mask nothing is cut off: it may be meant for other keys
            made.tensor = mask
            return made
        if mask.shape[3] > kv_len:  # made for a whole static cache
            mask = mask[..., :kv_len]
        if mask.shape[2] != q_len or mask.shape[3] != kv_len:
            raise ValueError(
                f"attention_mask describes {mask.shape[2]} queries and {mask.shape[3]} keys; the attention has {q_len} "
                f"and {kv_len}. Was it made for another call, or for a cache of another length?"
            )
        rows = unwrap(mask)
        if mask.kind == "causal" and rows.key_mask is None:
            made.causal = True
        elif mask.kind == "full":
            made.tensor = None if rows.key_mask is None else rows.key_mask[:, None, None, :]
        else:
            made.rows = rows
        return made

    def argument(self) -> RowIntervals | Tensor | None:
        """What `attend` takes as attn_mask, beside is_causal."""
        return self.rows if self.tensor is None else self.tensor

    def slide(self, window: int, causal: bool) -> None:
        """A layer with a window whose model built no mask; a bidirectional layer sees `window` keys on either side."""
        if window >= self.kv_len:
            return
        if causal:
            decoding = self.q_len == 1
            self.rows = RowIntervals.sliding_window(self.q_len, self.kv_len, window, self.device, lower_right=decoding)
            self.causal = False
        elif self.q_len == self.kv_len:
            self.rows = RowIntervals.sliding_window(self.q_len, self.kv_len, window + 1, self.device, causal=False)

    def separate(self, cu_q: Tensor, cu_k: Tensor | None, batch: int, chunk: int | None) -> None:
        """No document of a packed row sees another one; chunks of a chunked layer start with their document."""
        if batch != 1:
            raise ValueError(
                f"cu_seq_lens_q describes documents packed into a batch of one, but the batch is {batch}; flatten the "
                "batch, or give an attention_mask instead."
            )
        documents = _documents(cu_q, cu_q if cu_k is None else cu_k, self.q_len, self.kv_len, self.device, chunk)
        if chunk is not None and self.rows is not None:  # its chunks may have been counted from the first document
            self.rows = replace(self.rows, start=torch.zeros_like(self.rows.start), _ranges={})
        if self.tensor is not None:
            self.select(documents.dense(self.kv_len))
        else:
            seen = self._seen()
            self.rows = documents if seen is None else seen.intersect(documents)
            self.causal = False

    def select(self, chosen: Tensor) -> None:
        """Keep only keys that `chosen`, bool `[B or 1, Hq or 1, Q, K]`, keeps as well."""
        mask = self.tensor
        if mask is None:
            seen = self._seen()
            mask = None if seen is None else seen.dense(self.kv_len)
        if mask is None:
            self.tensor = chosen
        elif mask.dtype == torch.bool:
            self.tensor = mask & chosen
        else:
            self.tensor = mask.masked_fill(~chosen, float("-inf"))
        self.rows, self.causal = None, False

    def add(self, bias: Tensor, dtype: torch.dtype) -> None:
        """Add a position bias `[B or 1, Hq, Q, K]` to the scores, keeping its gradient."""
        bias = bias[..., : self.kv_len]
        mask = self.tensor
        if bias.dtype != dtype or (mask is not None and mask.dtype not in (torch.bool, bias.dtype)):
            bias = bias.float()
        if mask is None:
            seen = self._seen()
            if seen is None:
                self.tensor = bias
            else:
                self.rows, self.causal = replace(seen, bias=bias), False
        elif mask.dtype == torch.bool:
            self.tensor = torch.where(mask, bias, float("-inf"))
        else:
            self.tensor = mask.to(bias.dtype) + bias

    def _seen(self) -> RowIntervals | None:
        return RowIntervals.causal(self.q_len, self.kv_len, self.device) if self.causal else self.rows


def _documents(
    cu_q: Tensor, cu_k: Tensor, q_len: int, kv_len: int, device: torch.device, chunk: int | None
) -> RowIntervals:
    """Per query row the keys of its document, or of its document from the row's chunk on.

    Where queries were cut, their last rows are the last ones of the pack.
    """
    cu_q, cu_k = cu_q.to(device, torch.int32), cu_k.to(device, torch.int32)
    row = torch.arange(q_len, dtype=torch.int32, device=device) + (cu_q[-1] - q_len).clamp(min=0)
    document = torch.searchsorted(cu_q[1:].contiguous(), row, right=True)
    edges = torch.cat([cu_k, cu_k.new_full((1,), kv_len)])  # what follows the last document stands apart
    start = edges[document]
    if chunk is not None:
        begin = cu_q[document]
        start = start + torch.div(row - begin, chunk, rounding_mode="floor") * chunk
    return RowIntervals(start[None], edges[document + 1][None])


def _reads_text(module: Module, q_len: int, kv_len: int) -> bool:
    """Whether a layer that is not causal attends within text, which may be packed.

    What describes packed text also reaches towers and encoders beside it, where it means nothing: towers have no
    vocabulary, and an encoder's config says that a decoder follows.
    """
    config = getattr(module, "config", None)
    own = hasattr(config, "vocab_size") and not getattr(config, "is_encoder_decoder", False)
    return own and q_len == kv_len


def _chunk_size(module: Module) -> int | None:
    """The chunk length of a layer with chunked attention (Llama 4)."""
    config = getattr(module, "config", None)
    size, kinds = getattr(config, "attention_chunk_size", None), getattr(config, "layer_types", None)
    if size is None or kinds is None:
        return size
    return size if kinds[getattr(module, "layer_idx", 0)] == "chunked_attention" else None


def _chosen(indices: Tensor, kv_len: int) -> Tensor:
    """Bool `[..., kv_len]`, True at the listed positions of the last dim; negative ones list nothing."""
    listed = indices.long()
    listed = torch.where(listed < 0, kv_len, listed)
    keep = torch.zeros(*listed.shape[:-1], kv_len + 1, dtype=torch.bool, device=listed.device)
    return keep.scatter(-1, listed, True)[..., :kv_len]


def _chosen_blocks(module: Module, block_indices: Tensor, heads: int, kv_len: int) -> Tensor:
    """Bool `[B, Hq, Q, kv_len]` from blocks of keys chosen per group of heads, `[B, groups, Q, k]`."""
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int) or block_indices.dim() != 4 or heads % block_indices.shape[1]:
        raise NotImplementedError(
            f"block_indices of shape {tuple(block_indices.shape)} from {type(module).__name__}, which tells no block "
            'size that "ffpa" knows; use attn_implementation="sdpa".'
        )
    keep = _chosen(block_indices, -(-kv_len // size)).repeat_interleave(size, dim=-1)[..., :kv_len]
    return keep.repeat_interleave(heads // block_indices.shape[1], dim=1)


def _sinks(sinks: Tensor | None, heads: int) -> Tensor | None:
    if sinks is None or sinks.dim() == 1:
        return sinks
    if sinks.numel() != heads:
        raise NotImplementedError(
            f'sinks of shape {tuple(sinks.shape)}: "ffpa" takes one logit per query head, [{heads}], or one per query '
            f'and head, [B or 1, {heads}, Q, 1]; use attn_implementation="eager".'
        )
    return sinks.reshape(-1)


def _one_dtype(module: Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Norms kept in float32 beside half-precision weights leave float32 inputs; the half type is what the model runs.

    Outside autocast only: under it, `attend` casts as F.sdpa does.
    """
    dtypes: set[torch.dtype | None] = {query.dtype, key.dtype, value.dtype}
    if torch.float32 not in dtypes or torch.is_autocast_enabled(query.device.type):
        return query, key, value
    runs_in = dtypes - {torch.float32} or {_weight_dtype(module)}
    if len(runs_in) == 1 and runs_in <= {torch.float16, torch.bfloat16}:
        (dtype,) = runs_in
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value  # float32 throughout, or a mixture that attend refuses


def _weight_dtype(module: Module) -> torch.dtype | None:
    for part in module.modules():
        if isinstance(part, torch.nn.Linear):
            return part.weight.dtype
    return None


def _require_our_masks(module: Module) -> None:
    """Without a mask function under the same name transformers builds no masks at all: padding would be lost."""
    if torch.compiler.is_compiling() or "transformers.modeling_utils" not in sys.modules:  # then no model is calling
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = getattr(getattr(module, "config", None), "_attn_implementation", None) or NAME
    if ALL_MASK_ATTENTION_FUNCTIONS.get(name) is not ffpa_mask:
        raise RuntimeError(
            f'attn_implementation="{name}" runs the attention of ffpa_hf, but the mask function registered under that '
            "name is missing or someone else's, so that padding would be lost. ffpa_hf.register() registers both."
        )


def _refuse_unless_packed(mask: Tensor | None, module: Module) -> None:
    """A layer that chose its keys among those of every document chose wrongly, whatever is masked afterwards."""
    if isinstance(mask, IntervalMask):
        packed = mask.kind == "packed" or (torch.compiler.is_compiling() and mask.kind == "")  # a graph cannot tell
    else:
        packed = mask is not None
    if not packed:
        raise NotImplementedError(
            f"{type(module).__name__} chooses the keys of each row before the lengths of packed documents "
            "(cu_seq_lens_q) are known to it. Pass position_ids that restart with each document, use_cache=False and "
            "no 2-D attention_mask, so that it chooses inside each document."
        )


def _refuse_packed(mask: Tensor | None, cu_q: Tensor | None, module: Module) -> None:
    """Blocks of keys are chosen by position, and positions that restart name the keys of the first document."""
    if cu_q is not None or (isinstance(mask, IntervalMask) and mask.kind == "packed"):
        raise NotImplementedError(
            f"{type(module).__name__} chooses blocks of keys by position, across packed documents (with every "
            "attn_implementation). Give each document a row of its own."
        )


def _refuse_and_warn(module: Module, kwargs: dict[str, Any]) -> None:
    if kwargs.get("read_index") is not None or kwargs.get("write_index") is not None:
        raise NotImplementedError(
            f'"{NAME}" has no paged attention (continuous batching); use attn_implementation="sdpa" there.'
        )
    if kwargs.get("head_mask") is not None:
        raise NotImplementedError(f'"{NAME}" takes no head_mask; use attn_implementation="eager".')
    if kwargs.get("output_attentions") or _collects_weights():
        _warn_once(
            "output_attentions",
            f'attn_implementation="{NAME}" has no attention weights to return: output_attentions=True records none. '
            'Use "eager" to see them.',
        )
    if module.training and not torch.is_grad_enabled():
        if getattr(getattr(module, "config", None), "num_kv_shared_layers", 0):
            _warn_once(
                "reentrant",
                "a model that shares keys and values between layers runs in training mode without gradients. If this "
                "is reentrant gradient checkpointing, gradients through the shared keys and values are lost (with "
                'every attn_implementation): use gradient_checkpointing_kwargs={"use_reentrant": False}.',
            )


def _collects_weights() -> bool:
    """Whether transformers is collecting attention weights right now; some models do not tell their attention so."""
    if torch.compiler.is_compiling():
        return False
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    collected = None if collector is None else collector.get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


_warned: set[str] = set()


def _warn_once(topic: str, message: str) -> None:
    if torch.compiler.is_compiling() or topic in _warned or settings.silenced():
        return
    _warned.add(topic)
    warnings.warn(f"ffpa_hf: {message}", stacklevel=4)
