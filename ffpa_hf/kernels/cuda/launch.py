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


_variant = functools.lru_cache(maxsize=1024)(native_variant)


def forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(out like query, lse fp32 [B, Hq, Nq], row statistics fp32 [2, B, Hq, Nq], empty where there is no bias)."""
    query, key = inputs.query, inputs.key
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    out = torch.empty_like(query)
    lse = query.new_empty((batch, heads, q_len), dtype=torch.float32)
    stats = empty_stats(query) if inputs.bias is None else lse.new_empty((2, *lse.shape))
    if lse.numel() == 0:
        return out, lse, stats
    dropout = inputs.rng_state is not None and inputs.dropout_p > 0.0
    device = query.device
    capability = torch.cuda.get_device_capability(device)
    variant = _variant(
        head_dim, query.dtype, capability, causal=inputs.is_causal, intervals=inputs.row_start is not None,
        mask=inputs.mask is not None, key_mask=inputs.key_mask is not None,
        bias=None if inputs.bias is None else inputs.bias.dtype, dropout=dropout,
    )  # fmt: skip
    config = configs.choose_native(head_dim, configs.smem_limit_of(capability))
    slices, _ = configs.slices_of(head_dim)
    tiles = -(-q_len // config.block_m)
    call = Call(
        query=_view(query), key=_view(key), value=_view(inputs.value), out=_view(out),
        lse=lse.data_ptr(), stats=stats.data_ptr() if stats.numel() else None, stats_size=lse.numel(),
        mask=_pairs(inputs.mask), bias=_pairs(inputs.bias), key_mask=_vector(inputs.key_mask),
        row_start=_vector(inputs.row_start), row_end=_vector(inputs.row_end),
        rng=inputs.rng_state.data_ptr() if dropout and inputs.rng_state is not None else None,
        slope=inputs.scale * _LOG2E,
        threshold=min(drop_threshold(inputs.dropout_p), 2**32 - 1) if dropout else 0,
        # p = 1 keeps nothing: a factor of 0 also removes the one word in 2^32 that reaches the largest threshold.
        keep_scale=0.0 if inputs.dropout_p >= 1.0 else 1.0 / (1.0 - inputs.dropout_p),
        heads=heads, group=inputs.group, n_q=q_len, n_kv=kv_len, tiles=tiles,
    )  # fmt: skip
    index = device.index if device.index is not None else torch.cuda.current_device()
    with _on(index):
        program.load(variant).launch(
            index, torch.cuda.current_stream(index).cuda_stream, tiles * slices * batch * heads, config.threads,
            configs.native_smem(config, head_dim), (ctypes.c_void_p * 1)(ctypes.addressof(call)),
        )  # fmt: skip
    return out, lse, stats


def _on(index: int) -> contextlib.AbstractContextManager[object]:
    """Make a tensor's own GPU current, only where it is not already."""
    return contextlib.nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index)
