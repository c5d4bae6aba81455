"""From a transformers mask function to intervals: by recognising where the function comes from, else by evaluating it.

Reads closures of `transformers.masking_utils`; knows nothing of attention or of models beyond their window functions.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ffpa_hf.patches.interval_mask import IntervalMask, wrap

#: Mask elements evaluated at once where a mask function has to be evaluated.
_CHUNK_ELEMENTS = 1 << 24

#: Model types whose image tokens share one block id, so that rows are not runs and only values could tell.
_SPLIT_BLOCKS = frozenset({"molmo2", "molmo2_text"})


@dataclass(frozen=True)
class Geometry:
    """Where the local mask `[batch, 1, q_len, kv_len]` sits among absolute positions.

    q_offset may be a 0-d tensor (the counter of a static cache, which layers advance in place): everything here reads
    it at once. key_mask: bool `[B or 1, kv_len]`, keys that exist, or None.
    """

    batch: int
    q_len: int
    kv_len: int
    q_offset: int | Tensor
    kv_offset: int
    device: torch.device
    key_mask: Tensor | None

    @property
    def size(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.q_len, self.kv_len

    def rows_are_keys(self) -> bool:
        """Whether each row's own position is surely among the keys that exist."""
        if self.key_mask is not None or isinstance(self.q_offset, Tensor):
            return False
        return self.kv_offset <= self.q_offset and self.q_offset + self.q_len <= self.kv_offset + self.kv_len

    def rows(self) -> Tensor:
        """Absolute position of each query row, int64 `[1, q_len]`."""
        return torch.arange(self.q_len, device=self.device)[None] + self.q_offset


def build_mask(
    mask_function: Callable[..., Any],
    *,
    batch: int,
    q_len: int,
    kv_len: int,
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
    use_vmap: bool,
    device: torch.device,
    model_type: str = "",
) -> Tensor:
    """The mask that `mask_function` and the 2-D `padding` (bool `[B, seen]`, or None) describe.

    An `IntervalMask` where every row is one run of existing keys, else a dense bool `[B, 1, Q, K]`; never None. The
    padding is not read on the host. Unknown functions, and blocks of tokens, cost one host synchronisation.
    """
    geometry = Geometry(batch, q_len, kv_len, q_offset, kv_offset, device, local_padding(padding, kv_len, kv_offset))
    dense = functools.partial(_dense, mask_function, geometry, padding, use_vmap)
    if torch.jit.is_tracing():
        return dense()
    if torch.compiler.is_compiling():
        return _build_in_graph(mask_function, geometry, use_vmap, model_type, dense)
    mask = recognise(mask_function, geometry)
    if mask is None:
        mask = evaluate(mask_function, geometry, use_vmap)
    return dense() if mask is None else mask


def local_padding(padding: Tensor | None, kv_len: int, kv_offset: int) -> Tensor | None:
    """The part of a 2-D padding mask for keys kv_offset to kv_offset + kv_len; keys beyond the mask do not exist."""
    if padding is None:
        return None
    padding = padding.to(torch.bool)
    missing = kv_offset + kv_len - padding.shape[-1]
    if missing > 0:
        padding = F.pad(padding, (0, missing))
    return padding[:, kv_offset : kv_offset + kv_len]


# --- recognition ------------------------------------------------------------------------------------------------------


class Bounds(NamedTuple):
    """Absolute keys `[low, high)` that each row may see; None is unbounded. Tensors are int64 `[B or 1, Q]`.

    diagonal: high is the row's own position + 1. holds_row: the row's own position is always inside.
    """

    low: Tensor | None = None
    high: Tensor | None = None
    diagonal: bool = False
    holds_row: bool = True


def recognise(mask_function: Callable[..., Any], geometry: Geometry) -> IntervalMask | None:
    """Intervals of a composition of known mask functions, in O(N); None for anything else."""
    if geometry.q_len == 0 or geometry.kv_len == 0:
        return None
    recogniser = _Recogniser(geometry)
    bounds = recogniser.bounds(mask_function, geometry.rows(), conjunct=True)
    if bounds is None:
        return None
    if recogniser.checks and not bool(torch.stack(recogniser.checks).all()):
        return None
    return _interval_mask(bounds, geometry, recogniser.key_mask, "packed" if _is_packed(mask_function) else "")


def _interval_mask(bounds: Bounds, geometry: Geometry, key_mask: Tensor | None, kind: str = "") -> IntervalMask:
    first, length = geometry.kv_offset, geometry.kv_len
    rows = torch.zeros(1, geometry.q_len, dtype=torch.int64, device=geometry.device)
    low = rows if bounds.low is None else (bounds.low - first).clamp(0, length)
    high = rows + length if bounds.high is None else (bounds.high - first).clamp(0, length)
    low, high = torch.broadcast_tensors(low.to(torch.int32), high.to(torch.int32))
    return wrap(low.contiguous(), high.contiguous(), key_mask, geometry.size, kind or _kind(bounds, geometry))


def _kind(bounds: Bounds, geometry: Geometry) -> str:
    if bounds.low is not None:
        return ""
    if bounds.high is None:
        return "full"
    if bounds.diagonal and not isinstance(geometry.q_offset, Tensor):
        ahead = geometry.q_offset - geometry.kv_offset  # row 0 sees this many keys before its own
        if ahead + 1 >= geometry.kv_len:
            return "full"
        if ahead == 0:
            return "causal"
    return ""


@dataclass
class _Recogniser:
    """Walks a composition. checks: bool scalars that must all hold for the result to be exact."""

    geometry: Geometry
    checks: list[Tensor] = field(default_factory=list)
    key_mask: Tensor | None = None

    def __post_init__(self) -> None:
        self.key_mask = self.geometry.key_mask

    def bounds(
        self, function: Any, rows: Tensor, *, conjunct: bool, packed: bool = False, remapped: bool = False
    ) -> Bounds | None:
        """Bounds of `function` for rows at positions `rows`; conjunct: it is ANDed into the whole mask; packed: so are
        documents; remapped: positions count from the start of each document.
        """
        code = _code(function)
        name = _templates().get(code)
        if name is None:
            return self._own_window(function, rows) or self._constant(function, rows)
        cell = _closure(function)
        if name == "and":
            return self._intersection(cell["mask_functions"], rows, conjunct, packed, remapped)
        if name == "or":
            return self._union(cell["mask_functions"], rows, packed, remapped)
        if name == "causal":
            return Bounds(None, rows + 1, diagonal=True)
        if name == "bidirectional":
            return Bounds()
        if name == "sliding":
            return self._window(rows, cell["sliding_window"] - 1, None)
        if name == "bidirectional_sliding":
            return self._window(rows, cell["sliding_window"], cell["sliding_window"])
        if name == "chunked":
            return self._chunk(rows, cell["chunk_size"], cell["left_padding"])
        if remapped:  # what is left looks keys up by index, and an index within a document is none
            return None
        if name == "padding":
            return self._padding(cell["padding_mask"]) if conjunct else None
        if name == "packed":
            return self._same_id(cell["packed_sequence_mask"], rows, negative_is_alone=False)
        if name == "block":
            return self._same_id(cell["block_sequence_ids"], rows, negative_is_alone=True)
        if name == "remap" and packed:
            return self._remap(cell["mask_function"], cell["position_ids"], rows, conjunct)
        return None

    # --- combinations ---

    def _intersection(
        self, functions: Any, rows: Tensor, conjunct: bool, packed: bool, remapped: bool
    ) -> Bounds | None:
        packed = packed or any(_is_packed(each) for each in functions)
        result = Bounds()
        for function in functions:
            member = self.bounds(function, rows, conjunct=conjunct, packed=packed, remapped=remapped)
            if member is None:
                return None
            result = Bounds(
                _either(result.low, member.low, torch.maximum),
                _either(result.high, member.high, torch.minimum),
                (result.diagonal and (member.diagonal or member.high is None))
                or (member.diagonal and result.high is None),
                result.holds_row and member.holds_row,
            )
        return result

    def _union(self, functions: Any, rows: Tensor, packed: bool, remapped: bool) -> Bounds | None:
        result: Bounds | None = None
        for function in functions:
            member = self.bounds(function, rows, conjunct=False, packed=packed, remapped=remapped)
            if member is None:
                return None
            result = member if result is None else self._joined(result, member)
        return result

    def _joined(self, one: Bounds, other: Bounds) -> Bounds:
        if one.holds_row and other.holds_row:  # two runs through the row's own position are one run
            low = None if one.low is None or other.low is None else torch.minimum(one.low, other.low)
            high = None if one.high is None or other.high is None else torch.maximum(one.high, other.high)
            return Bounds(low, high, False, True)
        first, last = self.geometry.kv_offset, self.geometry.kv_offset + self.geometry.kv_len
        nothing = torch.zeros(1, self.geometry.q_len, dtype=torch.int64, device=self.geometry.device)
        lows = [nothing + first if b.low is None else b.low for b in (one, other)]
        highs = [nothing + last if b.high is None else b.high for b in (one, other)]
        empty = [low >= high for low, high in zip(lows, highs, strict=True)]
        low = torch.where(empty[0], lows[1], torch.where(empty[1], lows[0], torch.minimum(*lows)))
        high = torch.where(empty[0], highs[1], torch.where(empty[1], highs[0], torch.maximum(*highs)))
        between = self._existing(torch.minimum(*highs), torch.maximum(*lows))
        self.checks.append(((between <= 0) | empty[0] | empty[1]).all())
        return Bounds(low, high, False, one.holds_row or other.holds_row)

    def _remap(self, function: Any, position_ids: Tensor, rows: Tensor, conjunct: bool) -> Bounds | None:
        # Positions restart with each document and grow by one inside it: a document's bounds are shifted ones, and the
        # packed mask beside this one cuts them at its ends.
        geometry = self.geometry
        if isinstance(geometry.q_offset, Tensor) or geometry.q_offset or geometry.kv_offset:
            return None
        if position_ids.dim() != 2 or position_ids.shape[1] != geometry.q_len:
            return None
        positions = position_ids.to(torch.int64)
        inner = self.bounds(function, positions, conjunct=conjunct, remapped=True)
        if inner is None:
            return None
        shift = rows - positions
        return inner._replace(
            low=None if inner.low is None else inner.low + shift,
            high=None if inner.high is None else inner.high + shift,
        )

    # --- leaves ---

    def _window(self, rows: Tensor, before: int, after: int | None) -> Bounds:
        """Keys from row - before to row + after."""
        geometry = self.geometry
        reaches_start = reaches_end = False
        if not isinstance(geometry.q_offset, Tensor):  # a window wider than the keys is none
            reaches_start = geometry.q_offset + geometry.q_len - 1 - before <= geometry.kv_offset
            reaches_end = after is not None and geometry.q_offset + after + 1 >= geometry.kv_offset + geometry.kv_len
        return Bounds(
            None if reaches_start else rows - before,
            None if after is None or reaches_end else rows + after + 1,
            holds_row=before >= 0 and (after is None or after >= 0),
        )

    def _chunk(self, rows: Tensor, chunk: int, left_padding: Tensor) -> Bounds:
        skipped = left_padding.to(torch.int64)[:, None]
        low = torch.div(rows - skipped, chunk, rounding_mode="floor") * chunk + skipped
        return Bounds(low, low + chunk)

    def _padding(self, padding: Tensor) -> Bounds | None:
        geometry = self.geometry
        if padding.dim() != 2 or padding.shape[1] < geometry.kv_offset + geometry.kv_len:
            return None
        mine = local_padding(padding, geometry.kv_len, geometry.kv_offset)
        assert mine is not None
        self.key_mask = mine if self.key_mask is None else self.key_mask & mine
        return Bounds()

    def _same_id(self, ids: Tensor, rows: Tensor, *, negative_is_alone: bool) -> Bounds | None:
        """Keys with the row's own id. Exact where no existing key of another id lies between them, which is checked."""
        geometry = self.geometry
        first, length = geometry.kv_offset, geometry.kv_len
        if ids.dim() != 2 or ids.dtype.is_floating_point or ids.shape[1] < first + length:
            return None
        if not isinstance(geometry.q_offset, Tensor) and ids.shape[1] < geometry.q_offset + geometry.q_len:
            return None
        ids = ids.to(geometry.device, torch.int64)
        row_ids = ids[:, rows[0]]
        key_ids = ids[:, first : first + length]
        if geometry.key_mask is not None:
            key_ids = torch.where(geometry.key_mask, key_ids, _NO_ID)
            row_ids = row_ids.expand(key_ids.shape[0], -1)
        ordered, order = key_ids.sort(dim=-1, stable=True)
        row_ids = row_ids.contiguous()
        left = torch.searchsorted(ordered, row_ids)
        right = torch.searchsorted(ordered, row_ids, right=True)
        low = order.gather(1, left.clamp(max=length - 1)) + first
        high = order.gather(1, (right - 1).clamp(min=0)) + first + 1
        nobody = left >= right
        if negative_is_alone:
            nobody = nobody | (row_ids < 0)
        self.checks.append((nobody | (self._existing(low, high) == right - left)).all())
        low, high = torch.where(nobody, rows, low), torch.where(nobody, rows, high)
        return Bounds(low, high, holds_row=not negative_is_alone and geometry.rows_are_keys())

    def _existing(self, low: Tensor, high: Tensor) -> Tensor:
        """How many existing keys lie in [low, high); 0 or less where high <= low."""
        first, length = self.geometry.kv_offset, self.geometry.kv_len
        low, high = (low - first).clamp(0, length), (high - first).clamp(0, length)
        if self.geometry.key_mask is None:
            return high - low
        return _count_between(self.geometry.key_mask, low, high)

    def _own_window(self, function: Any, rows: Tensor) -> Bounds | None:
        reader = _model_windows(len(sys.modules)).get(_code(function))
        if reader is None:
            return None
        left, right = reader(_closure(function))  # own position - left < key < own position + right
        if left < 1:
            return None
        return self._window(rows, left - 1, max(right, 1) - 1)

    def _constant(self, function: Any, rows: Tensor) -> Bounds | None:
        if not isinstance(function, types.FunctionType) or not _is_constant(function):
            return None
        value = function(0, 0, 0, 0)
        if isinstance(value, Tensor) and (value.numel() != 1 or value.device.type != "cpu"):
            return None
        return Bounds() if bool(value) else Bounds(rows, rows, holds_row=False)


_NO_ID = torch.iinfo(torch.int64).min


def _either(one: Tensor | None, other: Tensor | None, both: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return both(one, other)


def _count_between(key_mask: Tensor, low: Tensor, high: Tensor) -> Tensor:
    counts = F.pad(key_mask.to(torch.int64).cumsum(-1), (1, 0))
    batch = max(counts.shape[0], low.shape[0], high.shape[0])
    counts, low, high = (tensor.expand(batch, -1) for tensor in (counts, low, high))
    return counts.gather(1, high) - counts.gather(1, low)


def _is_packed(function: Any) -> bool:
    """Whether documents are kept apart by the function as a whole, not by a part of it alone."""
    name = _templates().get(_code(function))
    return name == "packed" or (name == "and" and any(map(_is_packed, _closure(function)["mask_functions"])))


def _closure(function: Any) -> dict[str, Any]:
    contents = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, contents, strict=True))


@functools.cache
def _templates() -> dict[Any, str]:
    """Code object -> name of each mask function of this transformers version (an older one lacks some)."""
    from transformers import masking_utils

    nothing = torch.zeros(1, 1, dtype=torch.int64)
    makers: dict[str, tuple[str, tuple[Any, ...]]] = {
        "and": ("and_masks", ()),
        "or": ("or_masks", ()),
        "sliding": ("sliding_window_overlay", (1,)),
        "bidirectional_sliding": ("sliding_window_bidirectional_overlay", (1,)),
        "chunked": ("chunked_overlay", (1, nothing)),
        "padding": ("padding_mask_function", (nothing,)),
        "packed": ("packed_sequence_mask_function", (nothing,)),
        "block": ("blockwise_overlay", (nothing,)),
        "remap": ("remap_positions_for_packed_sequence", (lambda *_: True, nothing)),
    }
    names = {
        masking_utils.causal_mask_function.__code__: "causal",
        masking_utils.bidirectional_mask_function.__code__: "bidirectional",
    }
    for name, (maker, arguments) in makers.items():
        if hasattr(masking_utils, maker):
            names[getattr(masking_utils, maker)(*arguments).__code__] = name
    return names


#: Modeling module -> (maker of its window function, arguments to make one, closure -> keys (left, right) of the row's
#: own that it sees, both exclusive).
_MODEL_WINDOWS: dict[str, tuple[str, tuple[Any, ...], Callable[[dict[str, Any]], tuple[int, int]]]] = {
    "gemma3": ("_bidirectional_window_overlay", (1,), lambda cell: (cell["sliding_window"], cell["sliding_window"])),
    "gemma4": ("sliding_window_mask_function", ((1, 1),), lambda cell: cell["sliding_window"]),
    "moonshine_streaming": ("sliding_window_mask_function", ((1, 1),), lambda cell: cell["sliding_window"]),
    "t5gemma2": (
        "sliding_window_mask_function",
        (1,),
        lambda cell: (
            (cell["sliding_window"], 0)
            if cell["is_causal"]
            else ((cell["sliding_window"] + 1) // 2, cell["sliding_window"] // 2 + 1)
        ),
    ),
}


@functools.lru_cache(maxsize=1)
def _model_windows(loaded_modules: int) -> dict[Any, Callable[[dict[str, Any]], tuple[int, int]]]:
    """Code object -> closure reader of window functions in modeling modules that are loaded by now."""
    del loaded_modules  # only tells when to look again
    found = {}
    for model, (maker, arguments, reader) in _MODEL_WINDOWS.items():
        module = sys.modules.get(f"transformers.models.{model}.modeling_{model}")
        if hasattr(module, maker):
            found[getattr(module, maker)(*arguments).__code__] = reader
    return found


def _is_constant(function: types.FunctionType) -> bool:
    """Whether a function is a constant made by torch.tensor: models spell "every key" as such a lambda."""
    code = function.__code__
    if function.__closure__ or code.co_cellvars or not set(code.co_names) <= {"torch", "tensor", "bool"}:
        return False
    return not any(i.opname.startswith(("LOAD_FAST", "STORE_FAST")) for i in dis.get_instructions(function))


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(mask_function: Callable[..., Any], geometry: Geometry, use_vmap: bool) -> IntervalMask | None:
    """Evaluate any mask function in chunks of rows; None where a row is not one run of existing keys."""
    if geometry.q_len == 0 or geometry.kv_len == 0:
        return None
    rows = max(1, _CHUNK_ELEMENTS // max(1, geometry.batch * geometry.kv_len))
    lows, highs, checks = [], [], []
    for begin in range(0, geometry.q_len, rows):
        count = min(rows, geometry.q_len - begin)
        keep = _pattern(mask_function, geometry, use_vmap, begin, count)
        if geometry.key_mask is not None:
            keep = keep & geometry.key_mask[:, None]
        low, high = _runs(keep)
        lows.append(low)
        highs.append(high)
        inside = high - low
        if geometry.key_mask is not None:
            inside = _count_between(geometry.key_mask, low, high)
        checks.append((keep.sum(-1) == inside).all())
    if not bool(torch.stack(checks).all()):
        return None
    low, high = (torch.cat(parts, dim=1).to(torch.int32) for parts in (lows, highs))
    return wrap(low, high, geometry.key_mask, geometry.size, "packed" if _is_packed(mask_function) else "")


def _pattern(mask_function: Callable[..., Any], geometry: Geometry, use_vmap: bool, begin: int, count: int) -> Tensor:
    """The function's own bool values for some rows, `[B, count, kv_len]`, without padding."""
    some = replace(geometry, q_len=count, q_offset=geometry.q_offset + begin)
    return _dense(mask_function, some, None, use_vmap)[:, 0]


def _runs(keep: Tensor) -> tuple[Tensor, Tensor]:
    """First kept key and the one after the last, int64 `[B, rows]`; (0, 0) for rows that keep none."""
    kv_len = keep.shape[-1]
    key = torch.arange(kv_len, device=keep.device)
    high = torch.where(keep, key + 1, 0).amax(-1)
    low = torch.where(keep, key, kv_len).amin(-1)
    return torch.minimum(low, high), high


def _dense(mask_function: Callable[..., Any], geometry: Geometry, padding: Tensor | None, use_vmap: bool) -> Tensor:
    """The bool mask `[B, 1, q_len, kv_len]` that transformers itself makes of a mask function."""
    from transformers.masking_utils import sdpa_mask

    make: Any = sdpa_mask  # its annotations leave out what it takes and returns here
    return make(
        batch_size=geometry.batch,
        q_length=geometry.q_len,
        kv_length=geometry.kv_len,
        q_offset=geometry.q_offset,
        kv_offset=geometry.kv_offset,
        mask_function=mask_function,
        attention_mask=padding,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=geometry.device,
    )


def _build_in_graph(
    mask_function: Callable[..., Any],
    geometry: Geometry,
    use_vmap: bool,
    model_type: str,
    dense: Callable[[], Tensor],
) -> Tensor:
    """Under torch.compile closures cannot be read and values cannot be checked.

    The two plain functions are compared by identity. Other compositions of the library are runs of keys and are reduced
    in the graph, which the compiler fuses. Where a row may be something else (functions of a model or a user, blocks of
    tokens), the mask stays dense.
    """
    # The submodule by its own name: torch 2.11 does not trace an import of the lazy package.
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is causal_mask_function:
        bounds = Bounds(None, geometry.rows() + 1, diagonal=True)
    elif mask_function is bidirectional_mask_function:
        bounds = Bounds()
    elif use_vmap or model_type in _SPLIT_BLOCKS or _code(mask_function) is _or_code():
        return dense()
    else:
        low, high = _runs(_pattern(mask_function, geometry, use_vmap, 0, geometry.q_len))
        bounds = Bounds(low + geometry.kv_offset, high + geometry.kv_offset)
    return _interval_mask(bounds, geometry, geometry.key_mask)


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _or_code() -> Any:
    from transformers.masking_utils import or_masks

    return or_masks().__code__
