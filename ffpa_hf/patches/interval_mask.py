"""IntervalMask: RowIntervals inside a tensor that looks like the bool `[B, 1, Q, K]` mask it stands for.

Model code may slice, move, clone or compare it; only our attention function reads the intervals. Knows torch and
`masks` only: nothing here knows transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ffpa_hf.masks import RowIntervals

aten = torch.ops.aten

#: What a mask is known to be whatever its tensors hold (key_mask aside). "causal": row i sees keys 0..i of the first
#: key on; "full": every row sees every key; "packed": no row sees a document other than its own; "": only the tensors
#: tell.
KINDS = ("causal", "full", "packed", "")


class IntervalMask(Tensor):
    """A bool `[B, 1, Q, K]` mask held as intervals.

    start, end: int32 `[B or 1, Q]`, local key positions, half open. key_mask: bool `[B or 1, K]` or None. kind: one of
    `KINDS`. Slices, device moves, copies and expansion of the batch keep the intervals; every other operation sees the
    dense bool mask. Turning it into numbers or adding it to scores (a bool mask is no additive mask) and writing into
    it raise NotImplementedError.
    """

    start: Tensor
    end: Tensor
    key_mask: Tensor | None
    kind: str

    _rows: RowIntervals | None

    @staticmethod
    def __new__(
        cls, start: Tensor, end: Tensor, key_mask: Tensor | None, size: tuple[int, int, int, int], kind: str = ""
    ) -> IntervalMask:
        _, _, rows, keys = size
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, size, strides=(rows * keys, rows * keys, keys, 1), dtype=torch.bool, device=start.device
        )

    def __init__(
        self, start: Tensor, end: Tensor, key_mask: Tensor | None, size: tuple[int, int, int, int], kind: str = ""
    ) -> None:
        self.start, self.end, self.key_mask, self.kind = start, end, key_mask, kind
        self._rows = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def intervals(self) -> RowIntervals:
        """The intervals, as our attention takes them; one object per mask, so that what it derives is kept."""
        if torch.compiler.is_compiling():
            return RowIntervals(self.start, self.end, self.key_mask)
        if self._rows is None:
            self._rows = RowIntervals(self.start, self.end, self.key_mask)
        return self._rows

    def dense(self) -> Tensor:
        """The plain bool tensor this stands for, contiguous `[B, 1, Q, K]`; O(N^2) memory."""
        return self.intervals().dense(self.shape[3]).expand(self.shape).contiguous()

    def __setitem__(self, index: Any, value: Any) -> None:
        # Without this the write would reach a dense copy and be lost.
        raise NotImplementedError(_NO_WRITES.format("mask[...] = ..."))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        kind = f", {self.kind}" if self.kind else ""
        holes = ", key_mask" if self.key_mask is not None else ""
        return f"IntervalMask({tuple(self.shape)}, device={self.device}{kind}{holes})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return IntervalMask, (self.start, self.end, self.key_mask, tuple(self.shape), self.kind)

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        names = ["start", "end"] if self.key_mask is None else ["start", "end", "key_mask"]
        return names, self.kind

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], kind: str, size: Any, stride: Any) -> IntervalMask:
        return IntervalMask(inner["start"], inner["end"], inner.get("key_mask"), tuple(size), kind)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        keep = _KEEP.get(func)
        if keep is not None:
            kept = keep(func, *args, **kwargs)
            if kept is not None:
                return kept
        _refuse(func, args, kwargs)
        args, kwargs = tree_map_only(IntervalMask, IntervalMask.dense, (args, kwargs))
        return func(*args, **kwargs)

    def _like(self, function: Callable[[Tensor], Tensor]) -> IntervalMask:
        key_mask = None if self.key_mask is None else function(self.key_mask)
        return IntervalMask(function(self.start), function(self.end), key_mask, _size(self), self.kind)


def _size(mask: Tensor) -> tuple[int, int, int, int]:
    batch, heads, rows, keys = mask.shape
    return batch, heads, rows, keys


_NO_WRITES = "{} writes into an attention mask that is held as intervals; write into mask.dense() instead."


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The operations whose dense answer would be silently wrong, or lost."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, IntervalMask):
            raise NotImplementedError(_NO_WRITES.format(func))
    adds = func.overloadpacket in _ADDITIONS and any(_is_number(value) for value in (*args, *kwargs.values()))
    if adds or (func is aten._to_copy.default and (kwargs.get("dtype") or torch.bool).is_floating_point):
        raise NotImplementedError(  # not TypeError: Tensor's own operators would swallow it
            "This model computes with its attention mask as with numbers, but the 'ffpa' mask is a bool mask (True "
            "keeps): its attention does not go through transformers' attention interface. Load it with "
            "attn_implementation='eager'."
        )


_ADDITIONS = (aten.add, aten.sub, aten.rsub)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype.is_floating_point
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# --- operations that keep the intervals; each returns None where it cannot ------------------------------------------


def _map(func: Any, mask: Any, *args: Any, **kwargs: Any) -> IntervalMask | None:
    return mask._like(lambda tensor: func(tensor, *args, **kwargs))


def _alias(func: Any, mask: Any) -> IntervalMask | None:
    if torch.compiler.is_compiling():
        return mask._like(func)
    alias = mask._like(lambda tensor: tensor)
    alias._rows = mask.intervals()
    return alias


def _clone(func: Any, mask: Any, *, memory_format: Any = None) -> IntervalMask | None:
    return mask._like(torch.clone)


def _to_copy(func: Any, mask: Any, **kwargs: Any) -> IntervalMask | None:
    if kwargs.pop("dtype", None) not in (None, torch.bool):
        return None
    kwargs.pop("memory_format", None)
    return mask._like(lambda tensor: func(tensor, **kwargs))


def _slice(
    func: Any, mask: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> IntervalMask | None:
    size = list(_size(mask))
    dim = dim % 4
    length = size[dim]
    begin = 0 if start is None else _clip(start, length)
    stop = length if end is None else max(begin, _clip(end, length))
    if step != 1 or (dim == 1 and stop - begin != 1):
        return None
    size[dim] = stop - begin
    low, high, key_mask, kind = mask.start, mask.end, mask.key_mask, mask.kind
    if dim == 0:
        low, high = (bound[begin:stop] if bound.shape[0] != 1 else bound for bound in (low, high))
        if key_mask is not None and key_mask.shape[0] != 1:
            key_mask = key_mask[begin:stop]
        if size[0] == 0 or length == 0:
            return None
    elif dim == 2:
        low, high = low[:, begin:stop], high[:, begin:stop]
        if kind == "causal" and begin != 0:
            kind = ""
    elif dim == 3:
        low, high = (low - begin).clamp(min=0), (high - begin).clamp(max=stop - begin)
        key_mask = None if key_mask is None else key_mask[:, begin:stop]
        if kind == "causal" and begin != 0:
            kind = ""
    return IntervalMask(low, high, key_mask, (size[0], size[1], size[2], size[3]), kind)


def _clip(position: int, length: int) -> int:
    return min(max(position + length if position < 0 else position, 0), length)


def _expand(func: Any, mask: Any, size: Any, *, implicit: bool = False) -> IntervalMask | None:
    if len(size) != 4:
        return None
    batch, *others = (old if new == -1 else new for old, new in zip(mask.shape, size, strict=True))
    _, heads, rows, keys = _size(mask)
    if others != [heads, rows, keys]:
        return None
    return IntervalMask(mask.start, mask.end, mask.key_mask, (batch, heads, rows, keys), mask.kind)


def _same_view(func: Any, mask: Any, size: Any) -> IntervalMask | None:
    return mask._like(lambda tensor: tensor) if tuple(size) == tuple(mask.shape) else None


_KEEP: dict[Any, Callable[..., IntervalMask | None]] = {
    aten.alias.default: _alias,
    aten.detach.default: _alias,
    aten.lift_fresh.default: _map,
    aten._pin_memory.default: _map,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.slice.Tensor: _slice,
    aten.expand.default: _expand,
    aten.view.default: _same_view,
    aten._unsafe_view.default: _same_view,
}


@torch.compiler.allow_in_graph
def wrap(
    start: Tensor, end: Tensor, key_mask: Tensor | None, size: tuple[int, int, int, int], kind: str
) -> IntervalMask:
    """`IntervalMask(...)`, also inside a graph that torch.compile traces."""
    return IntervalMask(start, end, key_mask, size, kind)


@torch.compiler.allow_in_graph
def _parts(mask: IntervalMask) -> tuple[Tensor, ...]:
    return (mask.start, mask.end) if mask.key_mask is None else (mask.start, mask.end, mask.key_mask)


def unwrap(mask: IntervalMask) -> RowIntervals:
    """`mask.intervals()`, also inside a graph that torch.compile traces."""
    return RowIntervals(*_parts(mask)) if torch.compiler.is_compiling() else mask.intervals()
