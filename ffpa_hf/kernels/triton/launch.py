"""Host side of the Triton kernels: operands, addressing, rounds and launches.

The only file here that sees tensors. It must not decide what is served (`supports`) nor hold tile sizes (`configs`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ffpa_hf.kernels.common import AttentionInputs, aligned, empty_stats
from ffpa_hf.kernels.philox import drop_threshold
from ffpa_hf.kernels.triton import backward_kernels as device
from ffpa_hf.kernels.triton import choice, configs
from ffpa_hf.kernels.triton import fused_backward_kernels as fused
from ffpa_hf.kernels.triton.decode_kernels import decode_combine, decode_split
from ffpa_hf.kernels.triton.forward_kernel import attention_forward
from ffpa_hf.kernels.triton.primitives import Dropout, Scores, Visibility
from ffpa_hf.kernels.triton.wide_forward_kernels import forward_product, forward_scores
from ffpa_hf.kernels.tuning.tiles import Direction, Mode, Problem

_LOG2E = math.log2(math.e)
_LIMIT_32 = 2**31
_REMEMBERED = 4096  # shapes and strides whose consequences are kept
_MARGIN_ROWS = 256  # a tile may compute addresses this far past the last row before masking them
_COMBINE_COLUMNS, _COMBINE_SPLITS = 64, 32  # the tile of partial results that is summed at once

#: Tests set these: 64-bit addressing, and descriptors, whatever the tensors and the device are.
FORCE_WIDE: bool | None = None
FORCE_TMA: bool | None = None


class Gradients(NamedTuple):
    """What a backward call returns; None where no gradient was asked for."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None


@functools.lru_cache(maxsize=64)
def target_of(where: torch.device) -> configs.Target:
    """The target of a device; asks the driver once."""
    if where.type != "cuda":
        return configs.target_for(None)
    return configs.target_for(torch.cuda.get_device_capability(where), torch.version.hip is not None)


@functools.lru_cache(maxsize=64)
def _processors(where: torch.device) -> int:
    return torch.cuda.get_device_properties(where).multi_processor_count if where.type == "cuda" else 1


def _overlaps(target: configs.Target, where: torch.device) -> bool:
    """Whether a second kernel may start while the first ends and then wait for it (programmatic dependent launch)."""
    return target.tma and where.type == "cuda"


@functools.lru_cache(maxsize=64)
def _device_name(where: torch.device) -> str:
    """The GPU model, as tables name it; empty in the interpreter."""
    return torch.cuda.get_device_name(where) if where.type == "cuda" else ""


def _choose(direction: Direction, inputs: AttentionInputs, workspace_mb: int, autotune: Mode | None) -> Any:
    """The config of a call: tuned, else by rule."""
    query, key = inputs.query, inputs.key
    batch, q_heads, q_len, head_dim = query.shape
    mask = "causal" if inputs.is_causal else "none" if inputs.row_start is None else "intervals"
    sizes = head_dim, batch, q_heads, key.shape[1], q_len, key.shape[2]
    problem = Problem(*sizes, mask, _busy(inputs), query.element_size(), workspace_mb)
    where = query.device
    target = _target(where)
    found = choice.tuned(direction, problem, target, where, _device_name(where), autotune)
    return choice.by_rule(direction, problem, target) if found is None else found.tiles


def forward(
    inputs: AttentionInputs, workspace_mb: int, autotune: Mode | None = None, tiles: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(out like query, lse fp32 [B, Hq, Nq], row_stats fp32 [2, B, Hq, Nq] or empty) of one call.

    autotune: time a new bucket of shapes first. tiles: a config to run with, whatever the tables say.
    """
    query, kv_len = inputs.query, inputs.key.shape[2]
    batch, q_heads, q_len, _ = query.shape
    out = torch.empty_like(query)
    lse = torch.empty(batch, q_heads, q_len, dtype=torch.float32, device=query.device)
    stats = empty_stats(query) if inputs.bias is None else lse.new_empty(2, batch, q_heads, q_len)
    if lse.numel() == 0:
        return out, lse, stats
    if kv_len == 0:
        return _without_keys(inputs, out, lse, stats)
    with _on(query.device):
        _forward_run(inputs, out, workspace_mb, autotune, tiles)(inputs, out, lse, stats)
    return out, lse, stats


#: Prepared forwards without masks, sinks or dropout, by all that decides them: decoding repeats one for every layer.
_repeated: dict[tuple[Any, ...], _Fused | _Decode] = {}


def _forward_run(
    inputs: AttentionInputs, out: Tensor, workspace_mb: int, autotune: Mode | None, tiles: Any
) -> Callable[[AttentionInputs, Tensor, Tensor, Tensor], None]:
    """What fills (out, lse, stats) for inputs of these shapes and strides."""
    query, key, value = inputs.query, inputs.key, inputs.value
    name = None
    if autotune is None and tiles is None and _is_plain(inputs):
        name = (
            query.shape, key.shape, query.stride(), key.stride(), value.stride(), query.dtype, query.device,
            inputs.scale, inputs.is_causal, inputs.softcap, workspace_mb, FORCE_WIDE, FORCE_TMA, choice.epoch(),
        )  # fmt: skip
        known = _repeated.get(name)
        if known is not None and known.is_current():
            return known
    target = _target(query.device)
    tiles = tiles or _choose("forward", inputs, workspace_mb, autotune)
    if isinstance(tiles, configs.WideConfig):
        return functools.partial(_wide_forward, tiles, target.tma, workspace_mb)
    if isinstance(tiles, configs.DecodeConfig):
        run: _Fused | _Decode = _Decode(inputs, out, tiles, target)
    else:
        run = _Fused(inputs, out, tiles, target.tma)
    if name is not None:
        if len(_repeated) >= _REMEMBERED:
            _repeated.clear()
        _repeated[name] = run
    return run


def _is_plain(inputs: AttentionInputs) -> bool:
    """Whether query, key and value are the only tensors of a call."""
    return (
        inputs.mask is None and inputs.bias is None and inputs.row_start is None and inputs.key_mask is None
        and inputs.sinks is None and inputs.rng_state is None
    )  # fmt: skip


class _Launch:
    """One kernel with its grid, constants and options.

    Triton looks at every argument of a launch to find the compiled kernel, which takes longer than starting it. Who
    keeps a launch and runs it again promises that its arguments stay alike in all that Triton looks at: types, which
    are None, whole numbers, and 16-byte alignment; then the kernel that ran is started at once.
    """

    __slots__ = ("compiled", "constants", "grid", "kernel", "options", "ordered")

    def __init__(self, kernel: Any, programs: int, options: dict[str, Any], **constants: Any) -> None:
        self.kernel, self.grid, self.options, self.constants = kernel, (programs, 1, 1), options, constants
        self.compiled: Any = None
        self.ordered: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        if self.compiled is not None:
            self.compiled[self.grid](*arguments, *self.ordered)
            return
        compiled = self.kernel[self.grid](*arguments, **self.constants, **self.options)
        if compiled is not None:  # as it is in the interpreter
            self.ordered = tuple(self.constants[name] for name in self.kernel.arg_names[len(arguments) :])
            self.compiled = compiled


class _Fused:
    """The forward in one kernel."""

    def __init__(self, inputs: AttentionInputs, out: Tensor, config: configs.ForwardConfig, tma: bool) -> None:
        query, key, value = inputs.query, inputs.key, inputs.value
        batch, q_heads, q_len, head_dim = query.shape
        kv_len = key.shape[2]
        inner = configs.split_columns(head_dim, head_dim)
        columns = configs.split_columns(head_dim, config.width)
        slope, cap, positive = _score_factors(inputs)
        self.config, self.tma, self.scores = config, tma, Scores(slope, cap)
        self.q_boxes = (config.chunk, 0) if config.chunk else (inner.first, inner.second)
        self.v_boxes = columns.first, columns.second
        self.sizes = q_heads, inputs.group, q_len, kv_len, batch * q_heads * q_len
        self.launch = _Launch(
            attention_forward, batch * q_heads * -(-q_len // config.block_m) * columns.slices,
            {"num_warps": config.num_warps, "num_stages": config.num_stages},
            D=head_dim, D0=inner.first, D1=inner.second, CHUNK=config.chunk,
            W0=columns.first, W1=columns.second, SLICES=columns.slices,
            BM=config.block_m, BN=config.block_n,
            CAUSAL=inputs.is_causal, EVEN_KV=kv_len % config.block_n == 0, POSITIVE=positive,
            PHASED=config.phased or inputs.row_start is None,
            TMA=tma, INT=index_type(query, key, value, out, inputs.mask, inputs.bias),
        )  # fmt: skip

    def is_current(self) -> bool:
        """Whether its kernel is the one of this module still, which tools replace to watch it."""
        return self.launch.kernel is attention_forward

    def __call__(self, inputs: AttentionInputs, out: Tensor, lse: Tensor, stats: Tensor) -> None:
        config, tma = self.config, self.tma
        self.launch(
            *_operand(inputs.query, config.block_m, self.q_boxes, tma),
            *_operand(inputs.key, config.block_n, self.q_boxes, tma),
            *_operand(inputs.value, config.block_n, self.v_boxes, tma),
            out, _units(out), lse, stats if stats.numel() else None, inputs.sinks,
            _visibility(inputs), _dropout(inputs), self.scores, *self.sizes,
        )  # fmt: skip


class _Decode:
    """The forward of few rows: partial results of every split, then their sum; with one split that is the result."""

    def __init__(
        self, inputs: AttentionInputs, out: Tensor, config: configs.DecodeConfig, target: configs.Target
    ) -> None:
        query, key, value = inputs.query, inputs.key, inputs.value
        batch, q_heads, q_len, head_dim = query.shape
        kv_heads, kv_len = key.shape[1:3]
        rows = inputs.group * q_len
        config = configs.for_rows(config, head_dim, rows, target.smem_limit, query.element_size())
        row_tiles = configs.decode_row_tiles(config, rows)
        tiles = batch * kv_heads * row_tiles
        splits = configs.decode_splits(config, tiles, -(-kv_len // config.block_n), _processors(query.device))
        columns = configs.split_columns(head_dim, head_dim)
        slope, cap, _ = _score_factors(inputs)
        all_rows = batch * q_heads * q_len
        partial = torch.empty(splits, *query.shape, device="meta") if splits > 1 else None  # its extent alone
        integer = index_type(query, key, value, out, inputs.mask, inputs.bias, partial)
        overlap = splits > 1 and _overlaps(target, query.device)
        self.splits, self.scores = splits, Scores(slope, cap)
        self.units = _units(query), _units(key), _units(value), _units(out)
        self.sizes = q_heads, inputs.group, q_len, kv_len, all_rows, splits, row_tiles
        self.split = _Launch(
            decode_split, tiles * splits, {"num_warps": config.num_warps, "num_stages": config.num_stages},
            D=head_dim, D0=columns.first, D1=columns.second, BM=config.block_m, BN=config.block_n,
            CAUSAL=inputs.is_causal, PDL=overlap, INT=integer,
        )  # fmt: skip
        self.combine = _Launch(
            decode_combine, all_rows * -(-head_dim // _COMBINE_COLUMNS),
            {"num_warps": 4, **({"launch_pdl": True} if overlap else {})},
            D=head_dim, BD=_COMBINE_COLUMNS, BS=_COMBINE_SPLITS, PDL=overlap, INT=integer,
        )  # fmt: skip

    def is_current(self) -> bool:
        """Whether its kernels are those of this module still, which tools replace to watch them."""
        return self.split.kernel is decode_split and self.combine.kernel is decode_combine

    def __call__(self, inputs: AttentionInputs, out: Tensor, lse: Tensor, stats: Tensor) -> None:
        query, splits = inputs.query, self.splits
        partial = partial_stats = None
        if splits > 1:
            partial = lse.new_empty(splits, *query.shape)
            partial_stats = lse.new_empty(2, splits, *lse.shape)
        q_units, k_units, v_units, out_units = self.units
        stats_or_none = stats if stats.numel() else None
        self.split(
            query, q_units, inputs.key, k_units, inputs.value, v_units,
            out, out_units, lse, stats_or_none, inputs.sinks, partial, partial_stats,
            _visibility(inputs), _dropout(inputs), self.scores, *self.sizes,
        )  # fmt: skip
        if splits > 1:
            q_heads, _, q_len, _, all_rows, *_ = self.sizes
            self.combine(partial, partial_stats, out, out_units, lse, stats_or_none, q_heads, q_len, all_rows, splits)


def _wide_forward(
    config: configs.WideConfig, tma: bool, workspace_mb: int,
    inputs: AttentionInputs, out: Tensor, lse: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    """Round by round over one scratch: probabilities of some blocks of rows, then their product with the values."""
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, q_heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    scores, product = config.scores, config.product
    rows, itemsize = scores.block_m, query.element_size()
    processors = _processors(query.device)
    rounds = configs.wide_rounds(
        config, batch * q_heads, q_len, kv_len, inputs.is_causal, itemsize, workspace_mb, processors
    )
    blocks = max(part.blocks for part in rounds)
    slots = -(-kv_len // scores.block_n)
    weights = query.new_empty(1, 1, blocks * rows, slots * scores.block_n)
    norm = lse.new_empty(blocks, rows)
    segments = torch.empty(blocks, slots + 1, dtype=torch.int32, device=query.device)
    rescale = lse.new_empty(blocks, slots, rows)
    split = configs.split_columns(head_dim, product.width)
    slope, cap, _ = _score_factors(inputs)
    seen = _visibility(inputs)
    integer = index_type(query, key, value, out, lse, inputs.mask, inputs.bias, weights, rescale)
    shared = {"D": head_dim, "CAUSAL": inputs.is_causal, "TMA": tma, "INT": integer}
    for part in rounds:
        forward_scores[(part.blocks,)](
            *_operand(query, rows, (scores.chunk, 0), tma), *_operand(key, scores.block_n, (scores.chunk, 0), tma),
            weights, _units(weights), norm, segments, rescale, lse, stats if stats.numel() else None, inputs.sinks,
            seen, _dropout(inputs), Scores(slope, cap),
            *part, weights.shape[3], slots, q_heads, inputs.group, q_len, kv_len, lse.numel(),
            CHUNK=scores.chunk, BM=rows, BN=scores.block_n, EVEN_KV=kv_len % scores.block_n == 0, **shared,
            num_warps=scores.num_warps, num_stages=scores.num_stages,
        )  # fmt: skip
        forward_product[(part.blocks * split.slices,)](
            *_operand(weights, rows, (product.step, 0), tma),
            *_operand(value, product.step, (split.first, split.second), tma),
            out, _units(out), norm, segments, rescale, seen,
            *part, weights.shape[2], weights.shape[3], slots, q_heads, inputs.group, q_len, kv_len,
            W0=split.first, W1=split.second, SLICES=split.slices, BM=rows, BK=product.step, BN=scores.block_n, **shared,
            num_warps=product.num_warps, num_stages=product.num_stages,
        )  # fmt: skip


def backward(
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    stats: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: tuple[bool, bool, bool, bool, bool],
    workspace_mb: int,
    autotune: Mode | None = None,
    tiles: Any = None,
) -> Gradients:
    """Gradients of (query, key, value, bias, sinks) where `needs` asks for them; autotune and tiles as in `forward`.

    Scratch stays within `workspace_mb` MiB; the least is one row tile of one head, and fp32 sums of dK and dV where a
    head group takes several bands.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    need_q, need_k, need_v, need_bias, need_sinks = needs
    result = Gradients(
        torch.empty_like(query) if need_q else None,
        torch.empty_like(key) if need_k else None,
        torch.empty_like(value) if need_v else None,
        torch.empty_like(inputs.bias) if need_bias else None,
        None,
    )
    if lse.numel() == 0 or key.shape[2] == 0:
        for gradient in result[:4]:
            if gradient is not None:
                gradient.zero_()
        return result._replace(sinks=_no_key_sinks(inputs, lse, grad_lse) if need_sinks else None)

    out, grad_out = aligned(out), aligned(grad_out)
    target = _target(query.device)
    with _on(query.device):
        config = tiles or _choose("backward", inputs, workspace_mb, autotune)
        delta, pivot = _row_delta(out, grad_out, grad_lse, lse)
        if isinstance(config, configs.FusedBackwardConfig):
            _fused_backward(inputs, grad_out, pivot, delta, result, config, target.tma, workspace_mb)
            return result._replace(sinks=_sink_gradient(inputs.sinks, lse, delta) if need_sinks else None)
        call = _Backward(inputs, lse, stats, grad_out, delta, target, config)
        if need_q or need_k or need_v:
            call.products(result, workspace_mb)
        if result.bias is not None:
            call.bias_gradient(result.bias)
    if need_sinks:
        result = result._replace(sinks=_sink_gradient(inputs.sinks, lse, delta))
    return result


class _Backward:
    """The launches of one backward call, which share operands, masks and what the forward saved."""

    def __init__(
        self, inputs: AttentionInputs, lse: Tensor, stats: Tensor, grad_out: Tensor, delta: Tensor,
        target: configs.Target, config: configs.BackwardConfig,
    ) -> None:  # fmt: skip
        self.inputs, self.grad_out, self.tma, self.config = inputs, grad_out, target.tma, config
        self.head_dim = inputs.query.shape[3]
        self.seen, self.dropout = _visibility(inputs), _dropout(inputs)
        slope, cap, _ = _score_factors(inputs)
        self.scores = Scores(slope, cap)
        self.saved = device.Saved(lse, stats if stats.numel() else None, lse.numel(), delta)
        self.ranges = device.QueryRanges()
        if inputs.block_start is not None and inputs.block_end is not None:
            strides = _plain(inputs.block_start) + _plain(inputs.block_end)
            self.ranges = device.QueryRanges(inputs.block_start, inputs.block_end, strides)
        self.tensors = (inputs.query, inputs.key, inputs.value, grad_out, lse, inputs.mask, inputs.bias)

    def tile_operands(self, config: configs.ScoresConfig) -> tuple[Any, ...]:
        """The fields of query, key, value and grad_out as a scores tile reads them."""
        box = (config.chunk, 0)
        rows, keys = config.block_m, config.block_n
        inputs = self.inputs
        return (
            *_operand(inputs.query, rows, box, self.tma),
            *_operand(inputs.key, keys, box, self.tma),
            *_operand(inputs.value, keys, box, self.tma),
            *_operand(self.grad_out, rows, box, self.tma),
        )

    def products(self, result: Gradients, workspace_mb: int) -> None:
        """dQ, dK and dV, round by round over one scratch."""
        inputs, config = self.inputs, self.config
        batch, q_heads, q_len, _ = inputs.query.shape
        kv_heads, kv_len = inputs.key.shape[1:3]
        shape = (batch, q_heads, kv_heads, q_len, kv_len, self.head_dim)
        needs = tuple(gradient is not None for gradient in result[:3])
        plan = configs.plan_for(config, shape, inputs.query.element_size(), needs, workspace_mb)
        scratch = inputs.query.new_empty(plan.matrices, plan.lanes, 1, plan.rows, plan.cols)
        scores_scratch = scratch[0] if needs[0] or needs[1] else None
        weights_scratch = scratch[-1] if needs[2] else None
        partial = torch.empty(
            (2, 1, 1, kv_len, self.head_dim) if plan.banded else 0, dtype=torch.float32, device=scratch.device
        )
        integer = index_type(*self.tensors, *result[:3], scratch[0])
        for bounds in plan.rounds:
            span = _Span(*bounds, plan, q_heads, inputs.group, q_len, kv_len)
            self._scores(span, weights_scratch, scores_scratch, integer)
            if result.query is not None:
                _query_gradient(inputs, span, scores_scratch, result.query, config.query, self.tma, self.seen, integer)
            if result.key is not None:
                sums = partial[0] if plan.banded else None
                self._key_gradient(span, scores_scratch, inputs.query, result.key, sums, inputs.scale, integer)
            if result.value is not None:
                sums = partial[1] if plan.banded else None
                self._key_gradient(span, weights_scratch, self.grad_out, result.value, sums, 1.0, integer)

    def _scores(self, span: _Span, weights: Tensor | None, scores: Tensor | None, integer: tl.dtype) -> None:
        config = self.config.scores
        tiles = -(-(span.row1 - span.row0) // config.block_m) * -(-span.kv_len // config.block_n)
        target = weights if scores is None else scores
        device.backward_scores[(span.lanes * tiles,)](
            *self.tile_operands(config), weights, scores, _units(target),
            self.seen, self.ranges, self.dropout, self.scores, self.saved,
            span.lane0, span.row0, span.row1, span.plan.rows, span.plan.cols, *span.sizes,
            D=self.head_dim, CHUNK=config.chunk, BM=config.block_m, BN=config.block_n,
            HULL_M=max(config.block_m, self.config.query.block), HULL_N=max(config.block_n, self.config.key.block),
            CAUSAL=self.inputs.is_causal, EVEN_KV=span.kv_len % config.block_n == 0, TMA=self.tma, INT=integer,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    def _key_gradient(
        self, span: _Span, matrix: Tensor, other: Tensor, gradient: Tensor, sums: Tensor | None, factor: float,
        integer: tl.dtype,
    ) -> None:  # fmt: skip
        config = self.config.key
        columns = configs.split_columns(self.head_dim, config.width)
        tiles = -(-span.kv_len // config.block)
        heads = span.plan.heads
        device.gradient_key[(span.lanes // heads * tiles * columns.slices,)](
            *_operand(matrix, config.step, (config.block, 0), self.tma),
            *_operand(other, config.step, (columns.first, columns.second), self.tma),
            gradient, _units(gradient), sums, None if sums is None else _units(sums), self.ranges,
            span.lane0, heads, span.row0, span.row1, span.plan.rows, span.plan.cols, *span.sizes, factor,
            D=self.head_dim, W0=columns.first, W1=columns.second, SLICES=columns.slices,
            BN=config.block, BK=config.step, FIRST=span.first, LAST=span.last,
            CAUSAL=self.inputs.is_causal, TMA=self.tma, INT=integer,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    def bias_gradient(self, gradient: Tensor) -> None:
        """The gradient of the additive bias, in the bias's own shape."""
        config = self.config.bias
        batch, q_heads, q_len, _ = self.inputs.query.shape
        kv_len = self.inputs.key.shape[2]
        own_batch, own_heads, own_rows, own_cols = gradient.shape
        tiles = -(-own_rows // config.block_m) * -(-own_cols // config.block_n)
        device.gradient_bias[(own_batch * own_heads * tiles,)](
            *self.tile_operands(config), gradient, _plain(gradient),
            self.seen, self.dropout, self.scores, self.saved,
            own_heads, 1 if own_batch == batch else batch, 1 if own_heads == q_heads else q_heads,
            q_heads, self.inputs.group, q_len, kv_len,
            D=self.head_dim, CHUNK=config.chunk, BM=config.block_m, BN=config.block_n,
            PER_ROW=own_rows == q_len, PER_KEY=own_cols == kv_len,
            CAUSAL=self.inputs.is_causal, EVEN_KV=kv_len % config.block_n == 0,
            TMA=self.tma, INT=index_type(*self.tensors, gradient),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def _query_gradient(
    inputs: AttentionInputs, span: _Span, scores: Tensor, gradient: Tensor, config: configs.ProductConfig, tma: bool,
    seen: Visibility, integer: tl.dtype, keys_first: bool = False,
) -> None:  # fmt: skip
    """dQ of a round from dS: [lanes, 1, rows, keys], or [lanes, 1, keys, rows] where keys_first."""
    head_dim = inputs.query.shape[3]
    columns = configs.split_columns(head_dim, config.width)
    tiles = -(-(span.row1 - span.row0) // config.block)
    rows, cols = (config.step, config.block) if keys_first else (config.block, config.step)
    device.gradient_query[(span.lanes * tiles * columns.slices,)](
        *_operand(scores, rows, (cols, 0), tma),
        *_operand(inputs.key, config.step, (columns.first, columns.second), tma),
        gradient, _units(gradient), seen,
        span.lane0, span.row0, span.row1, span.plan.rows, span.plan.cols, *span.sizes, inputs.scale,
        D=head_dim, W0=columns.first, W1=columns.second, SLICES=columns.slices,
        BM=config.block, BK=config.step, KEYS_FIRST=keys_first, CAUSAL=inputs.is_causal, TMA=tma, INT=integer,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _fused_backward(
    inputs: AttentionInputs, grad_out: Tensor, pivot: Tensor, delta: Tensor, result: Gradients,
    config: configs.FusedBackwardConfig, tma: bool, workspace_mb: int,
) -> None:  # fmt: skip
    """dK and dV in one kernel that leaves dS, then dQ; round by round over one scratch."""
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    needs = tuple(gradient is not None for gradient in result[:3])
    if not any(needs):
        return
    keys, hull = config.keys, config.query.block
    plan = configs.plan_for(
        config, (batch, q_heads, kv_heads, q_len, kv_len, head_dim), query.element_size(), needs, workspace_mb
    )
    scratch = query.new_empty(plan.lanes, 1, plan.cols, plan.rows) if needs[0] else None
    partial = delta.new_empty(2, 1, 1, kv_len, head_dim) if plan.banded else (None, None)
    integer = index_type(query, key, value, grad_out, delta, *result[:3], scratch)
    seen = _visibility(inputs)
    tiles = -(-kv_len // keys.block_n)
    shared = {"CAUSAL": inputs.is_causal, "INT": integer}
    reach = None
    if inputs.row_start is not None and inputs.row_end is not None:
        batches = max(inputs.row_start.shape[0], inputs.row_end.shape[0])
        reach = torch.empty(batches, tiles, 2, dtype=torch.int32, device=query.device)
        fused.key_reach[(batches * tiles,)](
            seen, reach, tiles, q_len, kv_len, BN=keys.block_n, HULL=hull, TILES=16, **shared, num_warps=4
        )
    inner = configs.split_columns(head_dim, head_dim)
    box = (inner.first, inner.second)
    slope, _, _ = _score_factors(inputs)
    sums_strides = None if partial[0] is None else _units(partial[0])
    for bounds in plan.rounds:
        span = _Span(*bounds, plan, q_heads, inputs.group, q_len, kv_len)
        target = scratch
        if scratch is not None and tma:
            target = _operand(scratch, keys.block_n, (keys.block_m, 0), tma)[0]
        fused.gradient_key_value[(span.lanes // plan.heads * tiles,)](
            *_operand(query, keys.block_m, box, tma), *_operand(key, keys.block_n, box, tma),
            *_operand(value, keys.block_n, box, tma), *_operand(grad_out, keys.block_m, box, tma),
            target, None if scratch is None else _units(scratch),
            result.key, None if result.key is None else _units(result.key),
            result.value, None if result.value is None else _units(result.value),
            *partial, sums_strides,
            seen, reach, 0 if reach is None or reach.shape[0] == 1 else 2 * tiles, slope, pivot, delta,
            span.lane0, plan.heads, span.row0, span.row1, plan.rows, plan.cols, *span.sizes, inputs.scale,
            D=head_dim, D0=inner.first, D1=inner.second, BM=keys.block_m, BN=keys.block_n, HULL=hull,
            FIRST=span.first, LAST=span.last, EVEN_KV=kv_len % keys.block_n == 0, TMA=tma, **shared,
            num_warps=keys.num_warps, num_stages=keys.num_stages,
        )  # fmt: skip
        if scratch is not None and result.query is not None:
            _query_gradient(inputs, span, scratch, result.query, config.query, tma, seen, integer, keys_first=True)


class _Span(NamedTuple):
    """One round: lanes [lane0, lane0 + lanes) and rows [row0, row1); first and last band of its head group or not."""

    lane0: int
    lanes: int
    row0: int
    row1: int
    first: bool
    last: bool
    plan: configs.Plan
    q_heads: int
    group: int
    q_len: int
    kv_len: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Hq, group, n_q, n_kv as every kernel takes them."""
        return self.q_heads, self.group, self.q_len, self.kv_len


def _row_delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(delta, pivot), fp32 [B, Hq, Nq]: see the kernel."""
    delta, pivot = torch.empty_like(lse), torch.empty_like(lse)
    q_heads, q_len = lse.shape[1:]
    rows = 32
    device.row_delta[(lse.shape[0] * q_heads * -(-q_len // rows),)](
        out, grad_out, grad_lse, lse, delta, pivot, _units(out), _units(grad_out),
        (0, 0, 0) if grad_lse is None else _plain(grad_lse), q_heads, q_len,
        D=out.shape[3], BM=rows, BD=128, INT=index_type(out, grad_out, lse, grad_lse), num_warps=4,
    )  # fmt: skip
    return delta, pivot


def _sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink takes exp(sink - lse) of each row and has no value: its score's gradient is -exp(sink - lse) * delta."""
    alive = lse > float("-inf")
    share = torch.where(alive, torch.exp(sinks[None, :, None] - lse), 0.0)
    return -(share * torch.where(alive, delta, 0.0)).sum((0, 2))


def _no_key_sinks(inputs: AttentionInputs, lse: Tensor, grad_lse: Tensor | None) -> Tensor:
    delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse
    return _sink_gradient(inputs.sinks, lse, delta)


def _without_keys(inputs: AttentionInputs, out: Tensor, lse: Tensor, stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out.zero_()
    lse.fill_(float("-inf"))
    if inputs.sinks is not None:
        lse.copy_(inputs.sinks[None, :, None].expand_as(lse))
    if stats.numel():
        stats[0].copy_(lse * _LOG2E)
        stats[1].zero_()
    return out, lse, stats


def _score_factors(inputs: AttentionInputs) -> tuple[float, float | None, bool]:
    """slope and cap of `Scores`, and whether the slope is safely positive (so that -inf * slope stays -inf)."""
    if inputs.softcap is None:
        slope = inputs.scale * _LOG2E
        return slope, None, slope > 1e-30
    return 2.0 * _LOG2E * inputs.scale / inputs.softcap, inputs.softcap * _LOG2E, False


def _busy(inputs: AttentionInputs) -> bool:
    """Whether each score carries more work than a range test."""
    return not (inputs.mask is None and inputs.bias is None and inputs.softcap is None and inputs.rng_state is None)


def _visibility(inputs: AttentionInputs) -> Visibility:
    mask, key_mask = inputs.mask, inputs.key_mask
    if mask is None and key_mask is None and inputs.bias is None and inputs.row_start is None:
        return _ALL_VISIBLE

    def part(tensor: Tensor | None, strides: Callable[[Tensor], tuple[int | None, ...]], dims: int) -> tuple[Any, ...]:
        return (0,) * dims if tensor is None else strides(tensor)

    return Visibility(
        None if mask is None else mask.view(torch.uint8),
        inputs.bias,
        None if key_mask is None else key_mask.view(torch.uint8),
        inputs.row_start,
        inputs.row_end,
        part(mask, _pair_strides, 4)
        + part(inputs.bias, _pair_strides, 4)
        + part(key_mask, _plain, 2)
        + part(inputs.row_start, _plain, 2)
        + part(inputs.row_end, _plain, 2),
    )


_ALL_VISIBLE = Visibility(None, None, None, None, None, (0,) * 14)
_NO_DROPOUT = Dropout()


def _dropout(inputs: AttentionInputs) -> Dropout:
    if inputs.rng_state is None or inputs.dropout_p == 0.0:
        return _NO_DROPOUT
    threshold = min(drop_threshold(inputs.dropout_p), 2**32 - 1)
    signed = threshold - 2**32 if threshold >= 2**31 else threshold
    # p = 1 keeps nothing: a scale of 0 also removes the one word in 2^32 that reaches the largest 32-bit threshold.
    return Dropout(inputs.rng_state, signed, 0.0 if inputs.dropout_p >= 1.0 else 1.0 / (1.0 - inputs.dropout_p))


# What follows from a tensor's shape and strides alone is remembered: a call like an earlier one makes nothing anew but
# its descriptors.


def _plain(tensor: Tensor) -> tuple[int, ...]:
    """Strides in elements, 0 for a dim of size 1."""
    return _plain_strides(tensor.shape, tensor.stride())


@functools.lru_cache(maxsize=_REMEMBERED)
def _plain_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def _pair_strides(tensor: Tensor) -> tuple[int | None, ...]:
    """Strides of a mask or bias; None for a row dim that is broadcast."""
    batch, heads, rows, cols = _plain(tensor)
    return batch, heads, rows or None, cols


def _units(tensor: Tensor) -> tuple[int, int, int]:
    """Strides (b, h, n) in units of 16 bytes, 0 for a dim of size 1."""
    return _unit_strides(tensor.shape, tensor.stride(), 16 // tensor.element_size())


@functools.lru_cache(maxsize=_REMEMBERED)
def _unit_strides(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> tuple[int, int, int]:
    batch, heads, rows, _ = _plain_strides(shape, strides)
    return batch // unit, heads // unit, rows // unit


def _operand(tensor: Tensor, rows: int, boxes: tuple[int, int], tma: bool) -> tuple[Any, Any, tuple[int, int, int]]:
    """The fields of an `Operand`, which are three arguments of a launch: Triton 3.6 takes no descriptor in a tuple."""
    shape, strides = tensor.shape, tensor.stride()
    units = _unit_strides(shape, strides, 16 // tensor.element_size())
    if not tma:
        return tensor, tensor if boxes[1] else None, units
    first, second = _layouts(shape, strides, tensor.dtype, rows, boxes)
    return _descriptor(tensor, first), None if second is None else _descriptor(tensor, second), units


def _descriptor(tensor: Tensor, layout: dict[str, Any]) -> TensorDescriptor:
    made = object.__new__(TensorDescriptor)  # whose own checks, of what `aligned` has seen to, take 10 us a time
    made.__dict__.update(layout, base=tensor)
    return made


@functools.lru_cache(maxsize=_REMEMBERED)
def _layouts(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, boxes: tuple[int, int]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """All fields but the tensor of descriptors over [B, H, N, D], one for each box width (0: None), which passed
    Triton's checks. A dim of stride 0 gets size 1, and kernels multiply its coordinate by 0."""
    width = shape[-1]
    sizes, steps = [], []
    for size, stride in zip(shape[:3], _plain_strides(shape, strides)[:3], strict=True):
        sizes.append(size if stride else 1)
        steps.append(stride or width)  # any multiple of 16 bytes serves a dim of size 1
    anywhere = torch.empty(0, dtype=dtype)
    first, second = (
        vars(TensorDescriptor(anywhere, [*sizes, width], [*steps, 1], [1, 1, rows, box])) if box else None
        for box in boxes
    )
    assert first is not None
    return first, second


def needs_wide(*tensors: Tensor | None) -> bool:
    """Whether some element, or an address computed just past the last row, lies 2^31 or more elements in."""
    if FORCE_WIDE is not None:
        return FORCE_WIDE
    for tensor in tensors:  # spelled out: a generator costs more than what it asks
        if tensor is not None and _reach(tensor.shape, tensor.stride()) >= _LIMIT_32:
            return True
    return False


@functools.lru_cache(maxsize=_REMEMBERED)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the furthest address that a kernel may compute, read or not."""
    reach = 0
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        margin = _MARGIN_ROWS if dim >= len(shape) - 2 else 0
        reach += (size - 1 + margin) * stride if size > 1 else 0
    return reach


def index_type(*tensors: Tensor | None) -> tl.dtype:
    """The integer in which kernels compute addresses into these tensors."""
    return tl.int64 if needs_wide(*tensors) else tl.int32


def _target(where: torch.device) -> configs.Target:
    target = target_of(where)
    return target if FORCE_TMA is None else target._replace(tma=FORCE_TMA)


_HERE = contextlib.nullcontext()


def _on(where: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a tensor's own GPU current, only where it is not already."""
    if where.type != "cuda" or where.index in (None, torch.cuda.current_device()):
        return _HERE
    return torch.cuda.device(where)
