"""The door to the CuTe-DSL kernels: canonical tensors in, one call of an exported function out.

Objects come from the compile cache, or are built and kept there. Knows no planner.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffpa_hf.kernels import compile_cache
from ffpa_hf.kernels.common import AttentionInputs, empty_stats
from ffpa_hf.kernels.cute import configs

_LOG2E = 1.4426950408889634
#: Least |slope|: a scale of 0 still multiplies a hidden key's -inf to -inf, and everything else to nothing.
_LEAST = 2.0**-126
_ARCH = "sm_90a"
_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(out like query, lse fp32 [B, Hq, Nq], empty row statistics). Masks, softcap and sinks never come here."""
    query, key = inputs.query, inputs.key
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    if not lse.numel():
        return out, lse, empty_stats(query)
    if not key.shape[2]:  # no key: the kernel would wait for one
        return out.zero_(), lse.fill_(-torch.inf), empty_stats(query)
    function = loaded(configs.choose(query.shape[3], _NAMES[query.dtype], inputs.is_causal))
    index = query.device.index if query.device.index is not None else torch.cuda.current_device()
    with contextlib.nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index):
        function(*arguments(inputs, out, lse))
    return out, lse, empty_stats(query)


def arguments(inputs: AttentionInputs, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
    """What the exported function takes, in its order (the stream is the current one, taken by the function)."""
    query = inputs.query
    if any(stride == 0 and size > 1 for size, stride in zip(query.shape, query.stride(), strict=True)):
        query = query.contiguous()  # a TMA descriptor has no stride 0
    query = _plain(query)
    key, key_h, key_b = _shared(inputs.key)
    value, value_h, value_b = _shared(inputs.value)
    return (
        query, key, value, _plain(out), lse, slope_of(inputs.scale), inputs.group, key_h, key_b, value_h, value_b,
    )  # fmt: skip


def slope_of(scale: float) -> float:
    """Factor of a raw product in base-2 logits, never zero: see _LEAST."""
    slope = scale * _LOG2E
    return slope if abs(slope) >= _LEAST else _LEAST


def _plain(tensor: Tensor) -> Tensor:
    """The same elements, with strides of one row for dims of size 1, whose own may be anything."""
    width = tensor.shape[-1]
    strides = tuple(
        width if size == 1 else stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )
    return tensor if strides == tensor.stride()[:3] else tensor.as_strided(tensor.shape, (*strides, 1))


def _shared(tensor: Tensor) -> tuple[Tensor, int, int]:
    """(tensor with broadcast heads and batches of size 1, factors of the head and batch coordinate: 0 there, else 1).

    A TMA descriptor has no stride 0.
    """
    factors = tuple(int(tensor.shape[dim] > 1 and tensor.stride(dim) != 0) for dim in range(2))
    for dim, factor in enumerate(factors):
        if not factor:
            tensor = tensor.narrow(dim, 0, 1)
    return _plain(tensor), factors[1], factors[0]


@functools.lru_cache(maxsize=256)
def loaded(config: configs.ForwardConfig) -> Callable[..., Any]:
    """The function of a kernel, from the cache or built."""
    return _load(compile_cache.get(key_of(config), lambda: _build(config)))


def key_of(config: configs.ForwardConfig, arch: str = _ARCH) -> str:
    """The cache's name for a kernel: its sources, config and target, and the releases that compile and call it."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")]
    return compile_cache.key_of("cute", _sources(), repr(config), arch, *versions)


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for name in ("forward_sm90.py", "compat.py", "build.py"):
        digest.update((Path(__file__).parent / name).read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()


def _build(config: configs.ForwardConfig) -> bytes:
    from ffpa_hf.kernels.cute import build

    warnings.warn(
        f"CuTe-DSL compiles the forward for head_dim {config.head_dim} ({config.dtype}) once, some seconds.",
        RuntimeWarning,
        stacklevel=2,
    )
    return build.build(config, _ARCH)


def _load(content: bytes) -> Callable[..., Any]:
    """Link an object file into this process."""
    from cutlass.cute import runtime

    from ffpa_hf.kernels.cute.build import SYMBOL

    handle, path = tempfile.mkstemp(suffix=".o")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        module = runtime.load_module(path, enable_tvm_ffi=True)
        return getattr(module, SYMBOL)
    finally:
        os.unlink(path)
