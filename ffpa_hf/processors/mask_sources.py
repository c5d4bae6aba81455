"""Modules known to build N x N masks, and the O(N) form that their attention gets instead.

Only where a mask comes from decides; its values are never read. Reached by `ffpa_hf.enable`, which sees whole models.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from ffpa_hf.masks import RowIntervals
from ffpa_hf.processors.capture import _ATTRIBUTE, Slot, is_ours, slot_of, subclass
from ffpa_hf.processors.native import for_padded
from ffpa_hf.processors.rebind import rebound
from ffpa_hf.processors.redirect import IntervalArgument

if TYPE_CHECKING:
    from ffpa_hf.processors.generic import FFPAAttnProcessor

_BUILDER = "prepare_causal_attention_mask"
_MID_BLOCK = "diffusers.models.autoencoders.autoencoder_kl_hunyuan_video.HunyuanVideoMidBlock3D"
_CHROMA = "diffusers.models.transformers.transformer_chroma"
#: Blocks whose `attn` is given the outer product of a padding mask with itself.
_PADDED = frozenset({f"{_CHROMA}.ChromaTransformerBlock", f"{_CHROMA}.ChromaSingleTransformerBlock"})


def frame_causal(frames: int, tokens: int, device: torch.device) -> RowIntervals:
    """Video of `frames` frames of `tokens` tokens each: a token sees its own frame and every one before it."""
    end = torch.arange(1, frames + 1, dtype=torch.int32, device=device).mul_(tokens).repeat_interleave(tokens)[None]
    return RowIntervals(torch.zeros_like(end), end)


# --- blocks that hand a mask to their attention -----------------------------------------------------------------------


def _name(module: Module) -> str:
    kind: Any = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def builds_frame_mask(module: Module) -> bool:
    """Is this a block whose attention modules get a frame-causal mask that the block makes?"""
    return _name(module) == _MID_BLOCK


def install_frame_mask(module: Module, owner: FFPAAttnProcessor) -> None:
    """Let such a block make a `RowIntervals`. Undone as inline attention is. Idempotent; the newest owner counts."""
    slot = slot_of(module)
    if slot is not None:
        slot.owner = owner
        return
    kind: Any = type(module)
    module.__dict__[_ATTRIBUTE] = Slot(owner, None, None, native=_intervals, class_name=kind.__name__)
    module.__class__ = frame_mask_class(kind)


def _intervals(num_frames: int, height_width: int, dtype: torch.dtype, device: torch.device, **_: Any) -> RowIntervals:
    return frame_causal(num_frames, height_width, device)


@functools.cache
def frame_mask_class(original: Any) -> type:
    """The subclass of such a block's class: the same forward, with another builder of its mask."""
    plain = original.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        takes = all(attn is None or is_ours(attn.processor) for attn in self.attentions)
        if not takes or torch.compiler.is_compiling():  # compilers look globals up by module name
            return plain(self, *args, **kwargs)
        return rebound(plain, ((_BUILDER, _intervals),))(self, *args, **kwargs)

    return subclass(original, {"forward": forward}, frame_mask_class)


def note_padding(block: Module) -> None:
    """Tell the attention of a block that makes an N x N padding mask where its mask comes from."""
    slot = slot_of(block.attn) if _name(block) in _PADDED else None  # type: ignore[arg-type]
    if slot is not None:
        slot.native = for_padded(slot.native)


# --- modules that make a mask for their own inline attention ----------------------------------------------------------


def inline_overrides(original: Any) -> dict[str, Any]:
    """Methods of a subclass of `original` that make O(N) masks for its inline attention; most classes have none."""
    plain = vars(original).get(_BUILDER)
    if not isinstance(plain, staticmethod):
        return {}

    def prepare(
        n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return plain(n_frame, n_hw, dtype, device, batch_size)
        return IntervalArgument(frame_causal(n_frame, n_hw, device))

    return {_BUILDER: staticmethod(prepare)}
