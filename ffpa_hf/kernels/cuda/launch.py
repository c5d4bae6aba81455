"""The door to the CUDA C++ kernels: canonical tensors in, one structure and one launch out.

Chooses the variant and the tile, packs the call as src/call.cuh reads it. Knows no planner.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools

import torch
from torch import Tensor

from ffpa_hf.kernels.common import AttentionInputs, empty_stats
from ffpa_hf.kernels.cuda import configs, program
from ffpa_hf.kernels.philox import drop_threshold

_Map = ctypes.c_uint64 * 16
_LOG2E = 1.4426950408889634


def _fields(*names: str) -> list[tuple[str, type]]:
    return [(names[0], ctypes.c_void_p), *((name, ctypes.c_int64) for name in names[1:])]


class _View(ctypes.Structure):
    _fields_ = _fields("data", "b", "h", "n")


class _Pairs(ctypes.Structure):
    _fields_ = _fields("data", "b", "h", "q", "k")


class _Vector(ctypes.Structure):
    _fields_ = _fields("data", "b", "n")


class Call(ctypes.Structure):
    """`struct Call` of src/call.cuh, field by field."""

    _fields_ = [
        ("query", _View), ("key", _View), ("value", _View), ("out", _View),
        ("lse", ctypes.c_void_p), ("stats", ctypes.c_void_p), ("stats_size", ctypes.c_int64),
        ("mask", _Pairs), ("bias", _Pairs),
        ("key_mask", _Vector), ("row_start", _Vector), ("row_end", _Vector),
        ("rng", ctypes.c_void_p),
        ("slope", ctypes.c_float), ("threshold", ctypes.c_uint32), ("keep_scale", ctypes.c_float),
        ("heads", ctypes.c_int32), ("group", ctypes.c_int32), ("n_q", ctypes.c_int32), ("n_kv", ctypes.c_int32),
        ("tiles", ctypes.c_int32),
    ]  # fmt: skip


class TmaCall(ctypes.Structure):
    """`struct TmaCall` of src/tma_call.cuh, with the tail that its 64-byte alignment adds."""

    _fields_ = [
        ("query", ctypes.c_uint64 * 16), ("key", ctypes.c_uint64 * 16), ("value", ctypes.c_uint64 * 16),
        ("key_b", ctypes.c_int32), ("key_h", ctypes.c_int32), ("value_b", ctypes.c_int32), ("value_h", ctypes.c_int32),
        ("lanes", ctypes.c_int32), ("section", ctypes.c_int32),
        ("call", Call), ("tail", ctypes.c_uint8 * 64),
    ]  # fmt: skip


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides in elements, 0 for a dim of size 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _view(tensor: Tensor) -> _View:
    return _View(tensor.data_ptr(), *_strides(tensor)[:3])


def _pairs(tensor: Tensor | None) -> _Pairs:
    return _Pairs() if tensor is None else _Pairs(tensor.data_ptr(), *_strides(tensor))


def _vector(tensor: Tensor | None) -> _Vector:
    return _Vector() if tensor is None else _Vector(tensor.data_ptr(), *_strides(tensor))


def native_variant(
    head_dim: int, dtype: torch.dtype, capability: tuple[int, int], *, causal: bool = False, intervals: bool = False,
    mask: bool = False, key_mask: bool = False, bias: torch.dtype | None = None, dropout: bool = False,
) -> program.Variant:  # fmt: skip
    """What is compiled for a call; also how `ffpa-hf compile` and the tests name kernels."""
    config = configs.choose_native(head_dim, configs.smem_limit_of(capability))
    slices, width = configs.slices_of(head_dim)
    macros = {
        "D": head_dim,
        "BFLOAT16": dtype == torch.bfloat16,
        "SLICES": slices,
        "WIDTH": width,
        "ROW_WARPS": config.row_warps,
        "COL_WARPS": config.col_warps,
        "BN": config.block_n,
        "STAGES": config.stages,
        "STEP": config.step,
        "Q_RESIDENT": config.q_resident,
        "BLOCKS": config.blocks,
        "CAUSAL": causal,
        "INTERVALS": intervals,
        "MASK": mask,
        "KEY_MASK": key_mask,
        "BIAS": 0 if bias is None else 2 if bias == torch.float32 else 1,
        "DROPOUT": dropout,
        "STATS": bias is not None,
    }
    arch = f"sm_{capability[0]}{capability[1]}"
    return program.Variant("native_forward", arch, tuple((name, int(value)) for name, value in macros.items()))


def hopper_variant(
    head_dim: int, dtype: torch.dtype, *, causal: bool = False, intervals: bool = False, mask: bool = False,
    key_mask: bool = False, bias: torch.dtype | None = None,
) -> program.Variant:  # fmt: skip
    """What is compiled for a call of the forwards for Hopper's own instructions."""
    masked = mask or key_mask or bias is not None
    if head_dim > configs.WIDEST_TMA:
        twin = configs.choose_twin(head_dim, causal)
        name, tile = "twin_forward", {"KEYS": twin.keys, "PIECE": twin.piece, "STAGES": twin.stages, "LATE": twin.late}
    else:
        one = configs.choose_tma(head_dim, causal, masked)
        name, tile = "tma_forward", {"BN": one.block_n, "GROUPS": one.groups, "PIECE": one.piece, "STAGES": one.stages,
                                     "TURNS": one.turns}  # fmt: skip
    macros = {
        "D": head_dim,
        "BFLOAT16": dtype == torch.bfloat16,
        **tile,
        "CAUSAL": causal,
        "INTERVALS": intervals,
        "MASK": mask,
        "KEY_MASK": key_mask,
        "BIAS": 0 if bias is None else 2 if bias == torch.float32 else 1,
        "DROPOUT": False,
        "STATS": bias is not None,
    }
    return program.Variant(name, "sm_90a", tuple((name, int(value)) for name, value in macros.items()))


_native_variant = functools.lru_cache(maxsize=1024)(native_variant)
_hopper_variant = functools.lru_cache(maxsize=1024)(hopper_variant)
#: Bytes of keys and values that heads running at a time may have: half of what Hopper's L2 cache holds.
_L2 = 24 * 2**20


def forward(inputs: AttentionInputs, family: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """(out like query, lse fp32 [B, Hq, Nq], row statistics fp32 [2, B, Hq, Nq], empty where there is no bias)."""
    query = inputs.query
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    stats = empty_stats(query) if inputs.bias is None else lse.new_empty((2, *lse.shape))
    if lse.numel():
        index = query.device.index if query.device.index is not None else torch.cuda.current_device()
        with _on(index):
            run = _native
            if _takes_hopper(inputs, family, index):
                run = _twin if query.shape[3] > configs.WIDEST_TMA else _tma
            run(inputs, out, lse, stats, index)
    return out, lse, stats


def _takes_hopper(inputs: AttentionInputs, family: str, device: int) -> bool:
    _, _, q_len, head_dim = inputs.query.shape
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return configs.takes_hopper(family, head_dim, q_len, _drops(inputs), is_hopper)


def _native(inputs: AttentionInputs, out: Tensor, lse: Tensor, stats: Tensor, device: int) -> None:
    batch, heads, q_len, head_dim = inputs.query.shape
    capability = torch.cuda.get_device_capability(device)
    variant = _native_variant(
        head_dim, inputs.query.dtype, capability, causal=inputs.is_causal, **_masks(inputs), dropout=_drops(inputs)
    )
    config = configs.choose_native(head_dim, configs.smem_limit_of(capability))
    slices, _ = configs.slices_of(head_dim)
    tiles = -(-q_len // config.block_m)
    call = _call(inputs, out, lse, stats, tiles)
    _start(variant, device, tiles * slices * batch * heads, config.threads, configs.native_smem(config, head_dim), call)


def _tma(inputs: AttentionInputs, out: Tensor, lse: Tensor, stats: Tensor, device: int) -> None:
    batch, heads, q_len, head_dim = inputs.query.shape
    masks = _masks(inputs)
    variant = _hopper_variant(head_dim, inputs.query.dtype, causal=inputs.is_causal, **masks)
    reads = bool(masks["mask"] or masks["key_mask"] or masks["bias"])
    config = configs.choose_tma(head_dim, inputs.is_causal, reads)
    tiles = -(-q_len // config.block_m)
    chunks = configs.chunks_of(head_dim)
    whole = head_dim % configs.CHUNK == 0
    piece = config.piece if whole and chunks % config.piece == 0 else 0
    call = _tma_call(
        inputs, out, lse, stats, tiles,
        _map(inputs.query, config.block_m, chunks if whole else 0),
        _map(inputs.key, config.block_n, piece), _map(inputs.value, config.block_n, piece),
    )  # fmt: skip
    # Tiles of one length go to blocks that stay and load ahead; others to a block each, begun as one ends.
    grid = tiles * batch * heads
    if not (inputs.is_causal or masks["intervals"]):
        grid = min(grid, _processors(device))
    _start(variant, device, grid, config.threads, configs.tma_smem(config, head_dim), call)


def _twin(inputs: AttentionInputs, out: Tensor, lse: Tensor, stats: Tensor, device: int) -> None:
    batch, heads, q_len, head_dim = inputs.query.shape
    variant = _hopper_variant(head_dim, inputs.query.dtype, causal=inputs.is_causal, **_masks(inputs))
    config = configs.choose_twin(head_dim, inputs.is_causal)
    tiles = -(-q_len // config.block_m)
    whole = head_dim % configs.CHUNK == 0 and configs.chunks_of(head_dim) % config.piece == 0
    half = configs.half_of(head_dim)
    whole_values = head_dim % (2 * configs.CHUNK) == 0 and configs.chunks_of(half) % config.piece == 0
    call = _tma_call(
        inputs, out, lse, stats, tiles,
        _map(inputs.query, config.block_m, int(whole)),
        _map(inputs.key, config.keys, config.piece if whole else 0),
        _map(inputs.value, config.keys, config.piece if whole_values else 0),
    )  # fmt: skip
    _start(variant, device, 2 * tiles * batch * heads, config.threads, configs.twin_smem(config, head_dim), call)


def _tma_call(
    inputs: AttentionInputs, out: Tensor, lse: Tensor, stats: Tensor, tiles: int, *maps: ctypes.Array[ctypes.c_uint64]
) -> TmaCall:
    batch, heads = inputs.query.shape[:2]
    key_b, key_h = (int(stride != 0) for stride in _strides(inputs.key)[:2])
    value_b, value_h = (int(stride != 0) for stride in _strides(inputs.value)[:2])
    _, _, kv_len, head_dim = inputs.key.shape
    kept = max(1, _L2 // max(1, 2 * kv_len * head_dim * inputs.key.element_size()))  # heads of keys and values
    return TmaCall(
        *maps, key_b, key_h, value_b, value_h,
        batch * heads, min(kept * inputs.group, batch * heads), _call(inputs, out, lse, stats, tiles),
    )  # fmt: skip


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _start(
    variant: program.Variant, device: int, grid: int, threads: int, smem: int, argument: ctypes.Structure
) -> None:
    stream = torch.cuda.current_stream(device).cuda_stream
    addresses = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    program.load(variant).launch(device, stream, grid, threads, smem, addresses)


def _masks(inputs: AttentionInputs) -> dict[str, object]:
    return {
        "intervals": inputs.row_start is not None,
        "mask": inputs.mask is not None,
        "key_mask": inputs.key_mask is not None,
        "bias": None if inputs.bias is None else inputs.bias.dtype,
    }


def _drops(inputs: AttentionInputs) -> bool:
    return inputs.rng_state is not None and inputs.dropout_p > 0.0


def _call(inputs: AttentionInputs, out: Tensor, lse: Tensor, stats: Tensor, tiles: int) -> Call:
    query, dropout = inputs.query, _drops(inputs)
    return Call(
        query=_view(query), key=_view(inputs.key), value=_view(inputs.value), out=_view(out),
        lse=lse.data_ptr(), stats=stats.data_ptr() if stats.numel() else None, stats_size=lse.numel(),
        mask=_pairs(inputs.mask), bias=_pairs(inputs.bias), key_mask=_vector(inputs.key_mask),
        row_start=_vector(inputs.row_start), row_end=_vector(inputs.row_end),
        rng=inputs.rng_state.data_ptr() if dropout and inputs.rng_state is not None else None,
        slope=inputs.scale * _LOG2E,
        threshold=min(drop_threshold(inputs.dropout_p), 2**32 - 1) if dropout else 0,
        # p = 1 keeps nothing: a factor of 0 also removes the one word in 2^32 that reaches the largest threshold.
        keep_scale=0.0 if inputs.dropout_p >= 1.0 else 1.0 / (1.0 - inputs.dropout_p),
        heads=query.shape[1], group=inputs.group, n_q=query.shape[2], n_kv=inputs.key.shape[2], tiles=tiles,
    )  # fmt: skip


def _map(tensor: Tensor, rows: int, chunks: int) -> ctypes.Array[ctypes.c_uint64]:
    """A TMA map in 128-byte swizzle.

    chunks > 0: over (64 columns, rows, column chunks, heads, batches) in boxes of rows x chunks; the head dim is whole
    chunks. chunks = 0: over (columns, rows, 1, heads, batches) in boxes of 64 columns x rows; zeros fill what lies past
    the head dim. A dim of stride 0 gets size 1; the kernel multiplies its coordinate by 0.
    """
    from cuda.bindings import driver

    itemsize = tensor.element_size()
    batch, heads, length, width = tensor.shape
    stride_b, stride_h, stride_n, _ = _strides(tensor)
    columns = (configs.CHUNK, width // configs.CHUNK) if chunks else (width, 1)
    sizes = (columns[0], length, columns[1], heads if stride_h else 1, batch if stride_b else 1)
    strides = tuple((stride or width) * itemsize for stride in (stride_n, configs.CHUNK, stride_h, stride_b))
    whole = driver.cuuint64_t
    part = driver.cuuint32_t
    made = program.checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            if tensor.dtype == torch.bfloat16
            else driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            5,
            tensor.data_ptr(),
            [whole(size) for size in sizes],
            [whole(stride) for stride in strides],
            [part(size) for size in (configs.CHUNK, rows, max(chunks, 1), 1, 1)],
            [part(1)] * 5,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return _Map(*(int(word) for word in made.opaque))


def _on(index: int) -> contextlib.AbstractContextManager[object]:
    """Make a tensor's own GPU current, only where it is not already."""
    return contextlib.nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index)
