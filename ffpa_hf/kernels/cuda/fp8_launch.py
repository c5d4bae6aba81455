"""Launches of the FP8 kernels: three passes that quantise, one that attends. Canonical tensors in, strided output out.

Operands go through one scratch buffer in the tiles of src/fp8.cuh. Knows no planner.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ffpa_hf.kernels.common import AttentionInputs, empty_stats
from ffpa_hf.kernels.cuda import launch, program
from ffpa_hf.kernels.cuda.fp8_configs import KEY_TILE, ROW_BLOCK, Config, choose

_CHUNK = 128  # tokens of a partial sum


class _Quantise(ctypes.Structure):
    """`struct Quantise` of src/fp8_call.cuh, field by field."""

    _fields_ = [
        ("query", launch._View), ("key", launch._View), ("value", launch._View),
        *((name, ctypes.c_void_p) for name in (
            "q_codes", "k_codes", "v_codes", "q_scale", "k_scale", "v_scale", "k_mean", "v_mean", "moved",
            "k_sums", "v_sums", "v_most", "v_least",
        )),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in (
            "n_q", "n_kv", "width", "heads", "group", "batch", "k_count", "k_heads", "v_count", "v_heads", "k_b", "k_h",
            "smooth_k", "smooth_v",
        )),
    ]  # fmt: skip


class _Forward(ctypes.Structure):
    """`struct Fp8Call` of src/fp8_forward.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale", "v_mean", "moved")),
        *((name, ctypes.c_int32) for name in ("k_b", "k_h", "v_b", "v_h", "width", "first_tile")),
        ("slope", ctypes.c_float),
        ("call", launch.Call),
    ]  # fmt: skip


@dataclass
class Operands:
    """A call's quantised tensors. Codes are uint8 tiles, the rest float32:

    query `[B, Hq, row blocks, chunks, 64, width]`, query_scale and moved `[B, Hq, Nq]` (moved: what the keys' mean took
    from a row's scores, natural units); key `[K, tiles, chunks, 128, width]`, key_scale `[K, 2 tiles]`, key_mean
    `[K, D]`; value `[V, tiles, D, 128]`, value_scale and value_mean `[V, D]`. K and V count the heads that differ; rows
    are swizzled as src/fp8.cuh says.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_scale: Tensor
    key_scale: Tensor
    value_scale: Tensor
    key_mean: Tensor
    value_mean: Tensor
    moved: Tensor


def _carve(device: torch.device, sizes: list[tuple[tuple[int, ...], torch.dtype]]) -> Iterator[Tensor]:
    """Dense tensors side by side in one allocation, each at a multiple of 256 bytes."""
    at, places = 0, []
    for shape, dtype in sizes:
        places.append(at)
        at += -(-math.prod(shape) * dtype.itemsize // 256) * 256
    memory = torch.empty(at, dtype=torch.uint8, device=device)
    for (shape, dtype), place in zip(sizes, places, strict=True):
        yield memory[place : place + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _distinct(tensor: Tensor) -> tuple[int, int, int, int]:
    """(heads that differ, of one batch, place of the next batch, place of the next head) of keys or values."""
    batch, heads = tensor.shape[:2]
    stride_b, stride_h = launch._strides(tensor)[:2]
    own = heads if stride_h else 1
    return own * (batch if stride_b else 1), own, own if stride_b else 0, 1 if stride_h else 0


def variant(name: str, dtype: torch.dtype, config: Config, **features: bool | int) -> program.Variant:
    """What is compiled: a pass of the quantiser ("fp8_statistics", "fp8_finish", "fp8_codes") or "fp8_forward"."""
    macros: dict[str, bool | int] = {"D": config.head_dim, "BFLOAT16": dtype == torch.bfloat16}
    if name == "fp8_forward":
        macros |= {
            "SLICES": config.slices, "GROUPS": config.groups, "K_SLOTS": config.k_slots, "V_SLOTS": config.v_slots,
            "PROMOTE": config.promote, "FOLD": config.fold, "TAKE_TURNS": config.turns,
            "POLYNOMIAL": config.polynomial, "DROPOUT": False,
        }  # fmt: skip
        macros |= features
    return program.Variant(name, "sm_90a", tuple((key, int(value)) for key, value in macros.items()))


_variant = functools.lru_cache(maxsize=512)(variant)


def forward_variant(
    dtype: torch.dtype, config: Config, *, causal: bool = False, intervals: bool = False, mask: bool = False,
    key_mask: bool = False, bias: torch.dtype | None = None,
) -> program.Variant:  # fmt: skip
    """What is compiled for a call of the forward."""
    return variant(
        "fp8_forward", dtype, config, CAUSAL=causal, INTERVALS=intervals, MASK=mask, KEY_MASK=key_mask,
        BIAS=0 if bias is None else 2 if bias == torch.float32 else 1, STATS=bias is not None,
    )  # fmt: skip


_forward_variant = functools.lru_cache(maxsize=512)(forward_variant)


def quantise(inputs: AttentionInputs, config: Config, smooth_k: bool, smooth_v: bool, device: int) -> Operands:
    """Quantise query, key and value as kernels/quantised_reference.py defines."""
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, heads, n_q, width = query.shape
    n_kv, size = key.shape[2], config.head_dim
    tiles, chunks = -(-n_kv // KEY_TILE), -(-n_kv // _CHUNK)
    row_blocks = -(-n_q // ROW_BLOCK)
    k_count, k_heads, k_b, k_h = _distinct(key)
    v_count, v_heads, _, _ = _distinct(value)
    byte, real, part = torch.uint8, torch.float32, config.chunk_width
    made = list(_carve(query.device, [
        ((batch, heads, row_blocks, config.chunks, ROW_BLOCK, part), byte),
        ((k_count, tiles, config.chunks, KEY_TILE, part), byte),
        ((v_count, tiles, size, KEY_TILE), byte),
        ((batch, heads, n_q), real), ((k_count, 2 * tiles), real), ((v_count, size), real),
        ((k_count, size), real), ((v_count, size), real), ((batch, heads, n_q), real),
        ((k_count, chunks, width), real), *[((v_count, chunks, width), real)] * 3,
    ]))  # fmt: skip
    call = _Quantise(
        launch._view(query), launch._view(key), launch._view(value), *(tensor.data_ptr() for tensor in made),
        inputs.scale, n_q, n_kv, width, heads, inputs.group, batch, k_count, k_heads, v_count, v_heads, k_b, k_h,
        smooth_k, smooth_v,
    )  # fmt: skip
    dtype = query.dtype
    start, of = launch._start, functools.partial(_variant, dtype=dtype, config=config)
    start(of("fp8_statistics"), device, chunks * (k_count + v_count), width, 32 * size, call)
    start(of("fp8_finish"), device, -(-size // 32) * (k_count + v_count), 256, 0, call)
    blocks = batch * heads * row_blocks + 2 * tiles * k_count + -(-size // 64) * tiles * v_count
    start(of("fp8_codes"), device, blocks, 256, 0, call)
    return Operands(*made[:9])


def attend(
    inputs: AttentionInputs, operands: Operands, config: Config, out: Tensor, lse: Tensor, stats: Tensor,
    first_tile: int, device: int,
) -> None:  # fmt: skip
    """Write out, lse and stats (where there is a bias) of all query rows from tile `first_tile` on."""
    batch, heads, n_q, width = inputs.query.shape
    tiles = -(-n_q // config.block_m)
    if tiles <= first_tile:
        return
    _, _, k_b, k_h = _distinct(inputs.key)
    _, _, v_b, v_h = _distinct(inputs.value)
    call = launch._call(inputs, out, lse, stats, tiles)
    call.slope = 1.0  # scores reach the masks scaled
    argument = _Forward(
        *(tensor.data_ptr() for tensor in (
            operands.query, operands.key, operands.value, operands.query_scale, operands.key_scale,
            operands.value_scale, operands.value_mean, operands.moved,
        )),
        k_b, k_h, v_b, v_h, width, first_tile, abs(inputs.scale) * launch._LOG2E, call,
    )  # fmt: skip
    kernel = _forward_variant(inputs.query.dtype, config, causal=inputs.is_causal, **launch._masks(inputs))
    grid = (tiles - first_tile) * config.slices * batch * heads
    launch._start(kernel, device, grid, config.threads, config.smem, argument)


def forward(
    inputs: AttentionInputs, smooth_k: bool = True, smooth_v: bool = False, hybrid: bool = False,
    fast_accum: bool = False, config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out like query, lse fp32 [B, Hq, Nq], row statistics fp32 [2, B, Hq, Nq], empty where there is no bias).

    hybrid: the first tile of a causal call's rows, which see few keys, is computed in the input dtype. fast_accum: sums
    over the keys stay in the tensor core, in about 14 bits.
    """
    query = inputs.query
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    stats = empty_stats(query) if inputs.bias is None else lse.new_empty((2, *lse.shape))
    if not lse.numel():
        return out, lse, stats
    reads = inputs.mask is not None or inputs.bias is not None or inputs.key_mask is not None
    config = config or choose(query.shape[-1], reads, fast_accum)
    index = query.device.index if query.device.index is not None else torch.cuda.current_device()
    with launch._on(index):
        first_tile = 1 if hybrid and inputs.is_causal else 0
        if query.shape[2] > first_tile * config.block_m:
            attend(
                inputs, quantise(inputs, config, smooth_k, smooth_v, index), config, out, lse, stats, first_tile, index
            )
        if first_tile:
            rows = config.block_m
            early = AttentionInputs(
                query[:, :, :rows], inputs.key[:, :, :rows], inputs.value[:, :, :rows], inputs.scale, is_causal=True
            )
            early_out, early_lse, _ = launch.forward(early, "native")
            out[:, :, :rows], lse[:, :, :rows] = early_out, early_lse
    return out, lse, stats
