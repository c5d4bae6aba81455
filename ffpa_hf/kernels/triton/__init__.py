"""The Triton backend: what it serves, and the doors to its forward and backward.

Importing this needs no Triton: kernels are imported when the first call runs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffpa_hf import settings
from ffpa_hf.backends import TritonBackend
from ffpa_hf.kernels.common import Accepted, Answer, AttentionInputs, Capability, refusal, refuse
from ffpa_hf.kernels.triton import choice, configs
from ffpa_hf.kernels.tuning import constant_under_compile
from ffpa_hf.kernels.tuning.tiles import Direction, Problem

if TYPE_CHECKING:
    from ffpa_hf.call import AttentionCall

CAPABILITY = Capability(
    backend="triton",
    dtypes=(torch.float16, torch.bfloat16),
    bias_grad=True,
    dropout=True,
    softcap=True,
    sinks=True,
)
#: The interpreter multiplies bfloat16 wrongly, and takes float32, which tests need.
_INTERPRETED = Capability(
    backend="triton (interpreter)",
    dtypes=(torch.float16, torch.float32),
    bias_grad=True,
    dropout=True,
    softcap=True,
    sinks=True,
)


def supports(call: AttentionCall, config: TritonBackend | None = None, *, backward: bool = False) -> Answer:
    """Accepted, or Refused with the rule that keeps the Triton kernels from this call."""
    interpreter = settings.current().triton_interpret and call.device_type == "cpu"
    can = _INTERPRETED if interpreter else CAPABILITY
    refused = refusal(can, call, interpreter=interpreter, backward=backward)
    if refused is not None:
        return refused
    problem = _import_problem()
    if problem is not None:
        return refuse("package", "error", RuntimeError, "Triton cannot be used here: {}", problem)
    return Accepted()


def forward(inputs: AttentionInputs, config: TritonBackend) -> tuple[Tensor, Tensor, Tensor]:
    """(out like query, lse fp32 [B, Hq, Nq], row_stats fp32 [2, B, Hq, Nq] or empty where there is no bias)."""
    from ffpa_hf.kernels.triton import launch

    return launch.forward(inputs, config.workspace_mb, config.autotune_mode if config.autotune else None)


def backward(
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    row_stats: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: tuple[bool, bool, bool, bool, bool],
    config: TritonBackend,
) -> tuple[Tensor | None, ...]:
    """Gradients of (query, key, value, bias, sinks), None where `needs` is False; deterministic, bit for bit."""
    from ffpa_hf.kernels.triton import launch

    autotune = config.autotune_mode if config.autotune else None
    saved = inputs, out, lse, row_stats
    return tuple(launch.backward(*saved, grad_out, grad_lse, needs, config.workspace_mb, autotune))


def describe(call: AttentionCall, config: TritonBackend | None = None) -> str:
    """The kernels, tiles and scratch of a call, in one or two sentences."""
    config = config or TritonBackend()
    target = configs.target_for(call.capability, call.is_rocm)
    itemsize = torch.empty((), dtype=call.dtype).element_size()
    mask = "causal" if call.is_causal else "intervals" if call.mask_kind == "intervals" else "none"
    busy = call.mask_kind == "bool" or call.has_bias or call.softcap is not None or call.dropout_p > 0
    shape = (call.batch, call.q_heads, call.kv_heads, call.q_len, call.kv_len)
    problem = Problem(call.head_dim, *shape, mask, busy, itemsize, config.workspace_mb)
    name = call.device_name if call.device_type == "cuda" else ""
    tile, source = _chosen("forward", problem, target, name, config)
    loads = ("TMA descriptors" if target.tma else "pointers") + source
    if isinstance(tile, configs.DecodeConfig):
        text = _describe_decode(call, configs.for_rows(tile, *_rows(call), target.smem_limit, itemsize), source)
    elif isinstance(tile, configs.WideConfig):
        scores, product = tile.scores, tile.product
        columns = configs.split_columns(call.head_dim, product.width)
        text = (
            f"forward_scores: {scores.block_m} x {scores.block_n} tiles of probabilities to scratch (limit "
            f"{config.workspace_mb} MiB); forward_product: {product.block} x {_widths(columns)} tiles; loads through "
            f"{loads}."
        )
    else:
        columns = configs.split_columns(call.head_dim, tile.width)
        text = (
            f"attention_forward: {tile.block_m} x {tile.block_n} tiles, {columns.slices} x {_widths(columns)} output "
            f"columns, head dim {f'in steps of {tile.chunk}' if tile.chunk else 'at once'}, {tile.num_warps} warps, "
            f"{tile.num_stages} stages, loads through {loads}."
        )
    if not call.needs_grad or not call.q_len or not call.kv_len or not call.batch or not call.q_heads:
        return text
    tiles, source = _chosen("backward", problem, target, name, config)
    plan = configs.plan_for(tiles, (*shape, call.head_dim), itemsize, (True, True, True), config.workspace_mb)
    scratch = (
        f"{plan.scratch_bytes / 2**20:.0f} MiB of scratch (limit {config.workspace_mb}), {len(plan.rounds)} round"
        f"{'s' if len(plan.rounds) > 1 else ''}{', banded with fp32 sums' if plan.banded else ''}"
    )
    if isinstance(tiles, configs.FusedBackwardConfig):
        keys = tiles.keys
        return (
            f"{text} Backward: gradient_key_value in {keys.block_n} keys x {keys.block_m} rows, dS to {scratch}; then "
            f"dQ as a plain product{source}."
        )
    return (
        f"{text} Backward: scores in {tiles.scores.block_m} x {tiles.scores.block_n} tiles to {scratch}; then plain "
        f"products{source}."
    )


def _chosen(
    direction: Direction, problem: Problem, target: configs.Target, device_name: str, config: TritonBackend
) -> tuple[Any, str]:
    """(config, the table it comes from in words) of a described call."""
    autotune = config.autotune_mode if config.autotune else None
    found = choice.peek(direction, problem, target, device_name, autotune)
    if found is not None:
        return found.tiles, f"; tiles of {found.source}"
    later = "; these shapes are timed at the first such call" if autotune and device_name else ""
    return choice.by_rule(direction, problem, target), later


def _rows(call: AttentionCall) -> tuple[int, int]:
    """(head dim, query rows that share a key head)."""
    return call.head_dim, call.q_len * (call.q_heads // max(1, call.kv_heads))


def _describe_decode(call: AttentionCall, tile: configs.DecodeConfig, source: str) -> str:
    _, rows = _rows(call)
    tiles = call.batch * call.kv_heads * configs.decode_row_tiles(tile, rows)
    splits = configs.decode_splits(tile, tiles, -(-call.kv_len // tile.block_n), _processors(call.device_type))
    kernels = "decode_split" if splits == 1 else "decode_split, decode_combine"
    return (
        f"{kernels}: split-KV decode, {splits} split{'' if splits == 1 else 's'}, {rows} query rows of each key head "
        f"in tiles of {tile.block_m}, {tile.block_n} keys a step, {tile.num_warps} warps, {tile.num_stages} stages, "
        f"loads through pointers{source}."
    )


def _processors(device_type: str) -> int:
    """Multiprocessors, as the launcher counts them."""
    if device_type != "cuda":
        return 1
    if not torch.cuda.is_available():
        return configs.ASSUMED_PROCESSORS
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _widths(columns: configs.Columns) -> str:
    return f"{columns.first}+{columns.second}" if columns.second else f"{columns.first}"


@constant_under_compile
def _import_problem() -> str | None:
    """Why Triton cannot be imported, None where it can."""
    return _try_import()


@functools.lru_cache(maxsize=1)
def _try_import() -> str | None:
    """A broken package may raise anything."""
    try:
        import triton  # noqa: F401
        import triton.language  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
