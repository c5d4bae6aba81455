"""Masks: `RowIntervals`, causal alignment, and the canonical form in which every backend receives a mask.

Builds and combines masks as tensors on their own device; no function here reads a value back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ffpa_hf.kernels.common import RANGE_BLOCK

#: Rows of a dense comparison that are built at once while deriving query ranges (bounds the scratch to ~64 MiB).
_RANGE_SCRATCH_ELEMENTS = 1 << 26


@dataclass(frozen=True, eq=False)
class RowIntervals:
    """A mask in O(N) memory: each query row sees one run of keys.

    start, end: int32 `[B or 1, Nq]`, the half-open range of keys that a row may see; a row with end <= start sees none.
    Ranges reaching outside `[0, Nkv)` are clipped. key_mask: bool `[B or 1, Nkv]`, True for keys that exist (padding
    and holes are False). bias: float, added to the scaled scores, broadcastable to `[B, Hq, Nq, Nkv]`; has a gradient.

    Raises TypeError or ValueError for tensors of another dtype, rank or device.
    """

    start: Tensor
    end: Tensor
    key_mask: Tensor | None = None
    bias: Tensor | None = None
    _ranges: dict[int, tuple[tuple[int, int], tuple[Tensor, Tensor]]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, bound in (("start", self.start), ("end", self.end)):
            if not isinstance(bound, Tensor) or bound.dtype != torch.int32:
                given = bound.dtype if isinstance(bound, Tensor) else type(bound).__name__
                raise TypeError(f"RowIntervals: {name} must be an int32 tensor of shape [B or 1, Nq], not {given}.")
            if bound.dim() != 2:
                raise ValueError(f"RowIntervals: {name} must have shape [B or 1, Nq], not {tuple(bound.shape)}.")
        if self.start.shape[1] != self.end.shape[1] or not _broadcasts(self.start.shape[0], self.end.shape[0]):
            raise ValueError(
                f"RowIntervals: start {tuple(self.start.shape)} and end {tuple(self.end.shape)} differ in rows; "
                "they need the same Nq, and batches that are equal or 1."
            )
        if self.key_mask is not None:
            if not isinstance(self.key_mask, Tensor) or self.key_mask.dtype != torch.bool:
                given = self.key_mask.dtype if isinstance(self.key_mask, Tensor) else type(self.key_mask).__name__
                raise TypeError(f"RowIntervals: key_mask must be bool [B or 1, Nkv], not {given}.")
            if self.key_mask.dim() != 2:
                raise ValueError(
                    f"RowIntervals: key_mask must have shape [B or 1, Nkv], not {tuple(self.key_mask.shape)}."
                )
        bias = self.bias
        if bias is not None and not (isinstance(bias, Tensor) and bias.dtype.is_floating_point):
            given = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
            raise TypeError(f"RowIntervals: bias must be floating point, not {given}.")
        for name in ("end", "key_mask", "bias"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != self.start.device:
                raise ValueError(
                    f"RowIntervals: {name} is on {tensor.device}, start on {self.start.device}; one device is needed."
                )

    # --- builders -------------------------------------------------------------------------------------------------

    @classmethod
    def full(cls, q_len: int, kv_len: int, device: torch.device | str | None = None) -> RowIntervals:
        """Every row sees every key."""
        _require_lengths("full", q_len=q_len, kv_len=kv_len)
        start = torch.zeros(1, q_len, dtype=torch.int32, device=device)
        return cls(start, torch.full_like(start, kv_len))

    @classmethod
    def causal(cls, q_len: int, kv_len: int, device: torch.device | str | None = None) -> RowIntervals:
        """Row i sees keys 0..i: top-left alignment, which is what `is_causal=True` means."""
        _require_lengths("causal", q_len=q_len, kv_len=kv_len)
        return cls._diagonal(q_len, kv_len, 0, None, True, device)

    @classmethod
    def causal_lower_right(cls, q_len: int, kv_len: int, device: torch.device | str | None = None) -> RowIntervals:
        """The last row sees every key: bottom-right alignment, for queries that end where the keys end."""
        _require_lengths("causal_lower_right", q_len=q_len, kv_len=kv_len)
        return cls._diagonal(q_len, kv_len, kv_len - q_len, None, True, device)

    @classmethod
    def sliding_window(
        cls,
        q_len: int,
        kv_len: int,
        window: int,
        device: torch.device | str | None = None,
        *,
        causal: bool = True,
        lower_right: bool = False,
    ) -> RowIntervals:
        """Causal: a row sees the last `window` keys up to its own. Otherwise: keys closer than `window` on both sides.

        `lower_right` aligns the last row with the last key instead of the first row with the first key.
        """
        _require_lengths("sliding_window", q_len=q_len, kv_len=kv_len)
        if not isinstance(window, (int, torch.SymInt)) or window < 1:
            raise ValueError(
                f"RowIntervals.sliding_window: window={window!r} is not allowed; use a whole number from 1."
            )
        return cls._diagonal(q_len, kv_len, kv_len - q_len if lower_right else 0, window, causal, device)

    @classmethod
    def _diagonal(
        cls, q_len: int, kv_len: int, shift: int, window: int | None, causal: bool, device: torch.device | str | None
    ) -> RowIntervals:
        position = torch.arange(q_len, dtype=torch.int32, device=device)[None] + shift
        start = torch.zeros_like(position) if window is None else (position - (window - 1)).clamp(0, kv_len)
        if causal:
            end = (position + 1).clamp(0, kv_len)
        elif window is None:
            end = torch.full_like(position, kv_len)
        else:
            end = (position + window).clamp(0, kv_len)
        return cls(start, end)

    @classmethod
    def packed(
        cls,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        q_len: int,
        *,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
    ) -> RowIntervals:
        """Documents laid end to end in one row: each sees itself only.

        cu_seqlens_q, cu_seqlens_k: integer `[documents + 1]`, cumulative lengths from 0. q_len: packed query rows.
        causal and window (left, right; -1 is unbounded) are aligned to the bottom right of each document, as flash_attn
        defines them. Rows after the last document see nothing.
        """
        _require_lengths("packed", q_len=q_len)
        require_window("RowIntervals.packed: window", window)
        for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if not isinstance(offsets, Tensor) or offsets.dim() != 1:
                given = tuple(offsets.shape) if isinstance(offsets, Tensor) else type(offsets).__name__
                raise TypeError(f"RowIntervals.packed: {name} must be a one-dimensional integer tensor, not {given}.")
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            raise ValueError(
                f"RowIntervals.packed: cu_seqlens_q has {cu_seqlens_q.shape[0]} entries and cu_seqlens_k "
                f"{cu_seqlens_k.shape[0]}; each document needs one in both."
            )
        if cu_seqlens_q.shape[0] < 2:
            return cls.full(q_len, 0, cu_seqlens_q.device)
        row = torch.arange(q_len, dtype=torch.int32, device=cu_seqlens_q.device)
        cu_q, cu_k = cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32)
        document = torch.searchsorted(cu_q[1:].contiguous(), row, right=True, out_int32=True)
        known = document.clamp(max=cu_q.shape[0] - 2).long()
        inside = row < cu_q[-1]
        begin, finish = cu_k[known], cu_k[known + 1]
        diagonal = finish - (cu_q[known + 1] - row)  # the key in line with this row, bottom-right aligned
        left, right = window[0], 0 if causal else window[1]
        start = begin if left < 0 else torch.maximum(begin, diagonal - left)
        end = finish if right < 0 else torch.minimum(finish, diagonal + right + 1)
        end = torch.where(inside, end, torch.zeros_like(end))
        start = torch.where(inside, start, torch.zeros_like(start))
        return cls(start.to(torch.int32)[None], torch.maximum(start, end).to(torch.int32)[None])

    # --- views ----------------------------------------------------------------------------------------------------

    @property
    def q_len(self) -> int:
        """Query rows described."""
        return self.start.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of every tensor of the mask."""
        return self.start.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RowIntervals:
        """The same mask on another device."""
        return replace(self, **self._map(lambda t: t.to(device, non_blocking=non_blocking)), _ranges={})

    def rows(self, index: slice) -> RowIntervals:
        """The mask of a run of query rows."""
        bias = self.bias
        if bias is not None and bias.dim() >= 2 and bias.shape[-2] != 1:
            bias = bias[..., index, :]
        return replace(self, start=self.start[:, index], end=self.end[:, index], bias=bias, _ranges={})

    def intersect(self, other: RowIntervals) -> RowIntervals:
        """Keys that both masks allow. Biases add."""
        start = torch.maximum(self.start, other.start)
        end = torch.maximum(start, torch.minimum(self.end, other.end))
        key_mask = _combine(self.key_mask, other.key_mask, torch.logical_and)
        return RowIntervals(start, end, key_mask, _combine(self.bias, other.bias, torch.add))

    def dense(self, kv_len: int) -> Tensor:
        """The bool mask `[B or 1, 1, Nq, Nkv]` this stands for (without the bias); O(N^2) memory."""
        key = torch.arange(kv_len, dtype=torch.int32, device=self.device)
        keep = (key >= self.start[..., None]) & (key < self.end[..., None])
        if self.key_mask is not None:
            keep = keep & self.key_mask[:, None, :]
        return keep[:, None]

    def query_ranges(self, kv_len: int) -> tuple[Tensor, Tensor]:
        """For each 64-key block, the half-open range of query rows of which at least one can see a key of it.

        Returns two int32 `[B or 1, ceil(Nkv / 64)]` on the mask's device. key_mask is not read: a wider range is right.
        Computed once per mask and length, except under torch.compile, where it belongs to the graph.
        """
        version = self._version()
        if version is None:
            return self._query_ranges(kv_len)
        known = self._ranges.get(kv_len)
        if known is None or known[0] != version:
            known = self._ranges[kv_len] = (version, self._query_ranges(kv_len))
        return known[1]

    def _version(self) -> tuple[int, int] | None:
        """Counts writes into start and end, so that a refilled mask is computed anew; None where nothing may be kept.

        A graph must compute its own ranges from what its buffers hold at replay.
        """
        if torch.compiler.is_compiling() or self.start.is_inference() or self.end.is_inference():
            return None
        if self.start.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        return self.start._version, self.end._version

    def _query_ranges(self, kv_len: int) -> tuple[Tensor, Tensor]:
        start, end = torch.broadcast_tensors(self.start.clamp(min=0), self.end.clamp(max=kv_len))
        batch, q_len = start.shape
        blocks = (kv_len + RANGE_BLOCK - 1) // RANGE_BLOCK
        first = torch.full((batch, blocks), q_len, dtype=torch.int32, device=self.device)
        last = torch.zeros((batch, blocks), dtype=torch.int32, device=self.device)
        if q_len == 0 or blocks == 0:
            return first, last
        block_begin = torch.arange(blocks, dtype=torch.int32, device=self.device) * RANGE_BLOCK
        row = torch.arange(q_len, dtype=torch.int32, device=self.device)[None, :, None]
        if torch.compiler.is_compiling():  # one dense comparison; a loop would tie the graph to the length
            return _first_and_last(row, start[..., None], end[..., None], block_begin, q_len)
        step = max(1, _RANGE_SCRATCH_ELEMENTS // max(1, batch * blocks))
        for begin in range(0, q_len, step):
            piece = slice(begin, begin + step)
            low, high = start[:, piece, None], end[:, piece, None]
            piece_first, piece_last = _first_and_last(row[:, piece], low, high, block_begin, q_len)
            first, last = torch.minimum(first, piece_first), torch.maximum(last, piece_last)
        return first, last

    def _map(self, function: Any) -> dict[str, Any]:
        tensors = {name: getattr(self, name) for name in ("start", "end", "key_mask", "bias")}
        return {name: None if tensor is None else function(tensor) for name, tensor in tensors.items()}


def _require_lengths(builder: str, **lengths: Any) -> None:
    """Raise ValueError where a length is no whole number from 0 on; symbolic ones of torch.compile pass."""
    for name, length in lengths.items():
        whole = isinstance(length, (int, torch.SymInt)) and not isinstance(length, bool)
        if not whole or (isinstance(length, int) and length < 0):
            raise ValueError(f"RowIntervals.{builder}: {name}={length!r} is not allowed; use a whole number from 0.")


def require_window(name: str, window: Any) -> None:
    """Raise ValueError where a window is no pair of whole numbers; symbolic ones of torch.compile pass."""
    if isinstance(window, (tuple, list)) and len(window) == 2:
        if all(isinstance(side, (int, torch.SymInt)) and not isinstance(side, bool) for side in window):
            return
    raise ValueError(f"{name}={window!r} is not allowed; use (left, right), two whole numbers, where -1 is unbounded.")


def _first_and_last(row: Tensor, low: Tensor, high: Tensor, block: Tensor, q_len: int) -> tuple[Tensor, Tensor]:
    """First and last + 1 of the rows whose keys `[low, high)` reach into the blocks that begin at `block`."""
    sees = (low < block + RANGE_BLOCK) & (high > block) & (low < high)
    first, last = torch.where(sees, row, q_len).amin(1), torch.where(sees, row + 1, 0).amax(1)
    return first.to(torch.int32), last.to(torch.int32)


def _combine(first: Tensor | None, second: Tensor | None, operation: Any) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return operation(first, second)


def _broadcasts(size: int, other: int) -> bool:
    return size == other or size == 1 or other == 1


MaskKind = Literal["none", "bool", "additive", "intervals"]


class CanonicalMask(NamedTuple):
    """One mask in the form that kernels take; every field may be absent.

    mask: bool `[B|1, Hq|1, Nq|1, Nkv|1]`, True keeps. bias: float of the same shape rules. intervals: `RowIntervals`
    whose bias, if any, has moved to `bias`.
    """

    kind: MaskKind = "none"
    is_causal: bool = False
    mask: Tensor | None = None
    bias: Tensor | None = None
    intervals: RowIntervals | None = None


_NO_MASK, _CAUSAL = CanonicalMask(), CanonicalMask(is_causal=True)


def canonical_mask(
    attn_mask: Any, is_causal: bool, *, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device
) -> CanonicalMask:
    """Check a mask argument against the call it belongs to and sort it into its canonical form.

    Accepts None, a bool or floating tensor broadcastable to `[B, Hq, Nq, Nkv]`, a `RowIntervals`, or one of torch's
    `CausalBias` objects. Raises TypeError or ValueError naming the argument, what was given and what is allowed.
    """
    if attn_mask is None:
        return _CAUSAL if is_causal else _NO_MASK
    if is_causal:
        raise ValueError(
            "attn_mask and is_causal=True were both given; give one. A causal mask with more to it is a RowIntervals: "
            "RowIntervals.causal(Nq, Nkv).intersect(...)."
        )
    alignment = _causal_bias_alignment(attn_mask)
    if alignment is not None:
        build = RowIntervals.causal if alignment == "upper_left" else RowIntervals.causal_lower_right
        rows, keys = attn_mask.seq_len_q, attn_mask.seq_len_kv
        if (rows, keys) != (q_len, kv_len):
            raise ValueError(f"attn_mask is a CausalBias of {rows} x {keys}; the call has {q_len} x {kv_len}.")
        if alignment == "upper_left" or q_len == kv_len:
            return CanonicalMask(is_causal=True)
        return CanonicalMask("intervals", intervals=build(q_len, kv_len, device))
    shape = (batch, heads, q_len, kv_len)
    if isinstance(attn_mask, RowIntervals):
        return _canonical_intervals(attn_mask, shape, device)
    if not isinstance(attn_mask, Tensor):
        raise TypeError(
            f"attn_mask must be None, a bool or floating tensor, a RowIntervals or torch's CausalBias, "
            f"not {type(attn_mask).__name__}."
        )
    tensor = _collapsed(_four_dims(attn_mask, shape, "attn_mask", device))
    if tensor.dtype == torch.bool:
        return CanonicalMask("bool", mask=tensor)
    if tensor.dtype.is_floating_point:
        return CanonicalMask("additive", bias=tensor)
    raise TypeError(f"attn_mask must be bool (True keeps) or floating point (added), not {tensor.dtype}.")


def _canonical_intervals(
    intervals: RowIntervals, shape: tuple[int, int, int, int], device: torch.device
) -> CanonicalMask:
    batch, _, q_len, kv_len = shape
    if intervals.device != device:
        raise ValueError(f"attn_mask (RowIntervals) is on {intervals.device}, query on {device}; one device is needed.")
    if intervals.q_len != q_len:
        raise ValueError(f"attn_mask (RowIntervals) describes {intervals.q_len} query rows; query has {q_len}.")
    for name in ("start", "end", "key_mask"):
        tensor = getattr(intervals, name)
        if tensor is not None and tensor.shape[0] not in (1, batch):
            raise ValueError(
                f"attn_mask (RowIntervals): {name} has batch {tensor.shape[0]}; 1 or the call's {batch} is needed."
            )
    if intervals.key_mask is not None and intervals.key_mask.shape[1] != kv_len:
        raise ValueError(
            f"attn_mask (RowIntervals): key_mask has {intervals.key_mask.shape[1]} keys; the call has {kv_len}."
        )
    bias = intervals.bias
    if bias is not None:
        bias = _collapsed(_four_dims(bias, shape, "attn_mask (RowIntervals): bias", device))
    return CanonicalMask("intervals", bias=bias, intervals=intervals)


def _four_dims(tensor: Tensor, shape: tuple[int, int, int, int], name: str, device: torch.device) -> Tensor:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, query on {device}; one device is needed.")
    if tensor.dim() > 4 or tensor.dim() < 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must broadcast to {shape} [B, Hq, Nq, Nkv].")
    view = tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 4 else tensor
    for have, want in zip(view.shape, shape, strict=True):
        if have != 1 and have != want:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must broadcast to {shape} [B, Hq, Nq, Nkv].")
    return view


def _collapsed(tensor: Tensor) -> Tensor:
    """Expanded dims (stride 0) back to size 1, so that kernels see the broadcast; a gradient keeps the full shape."""
    if tensor.requires_grad:
        return tensor
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _causal_bias_alignment(attn_mask: Any) -> str | None:
    """ "upper_left" or "lower_right" for torch's CausalBias objects (a tensor subclass), else None."""
    variant = getattr(attn_mask, "variant", None)
    if variant is None or not hasattr(attn_mask, "seq_len_q"):
        return None
    return "upper_left" if variant.name == "UPPER_LEFT" else "lower_right"
