"""The self-test of family "cuda-fp8": codes and scales bit for bit, outputs against float64 of what codes stand for.

Builds calls as `selftest` does and judges results; processes, order and verdicts are that module's and the command
line's.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffpa_hf.kernels import quantised_reference as quantised
from ffpa_hf.kernels.common import AttentionInputs, aligned
from ffpa_hf.kernels.reference import attention
from ffpa_hf.kernels.selftest import ROUNDING, Check, Outcome, build_inputs, distances, nan_in_new_memory

if TYPE_CHECKING:
    from ffpa_hf.kernels.cuda.fp8_launch import Operands

#: How much larger than the reference's own error the kernel's may be, beside the rounding of the output.
_OVER = 1.05
#: Of the log-sum-exp, absolute and per unit of the largest one: the tensor core keeps about 14 bits of a score.
_LSE_LIMIT = 2.0**-8

#: Of a sum of values of one sign: what the tensor core drops of 512 keys' products. Of 4096 it drops 6%.
_LOST = 0.01

_HEAD_DIMS = (64, 72, 96, 128, 136, 160, 192, 200, 256, 264, 320, 384, 448, 512)
_FEATURES: tuple[dict[str, Any], ...] = (
    {"mask": "causal", "kv_heads": 1, "q_len": 513, "kv_len": 513},
    {"mask": "causal", "q_len": 200, "kv_len": 520, "kv_heads": 2},
    {"mask": "causal", "q_len": 520, "kv_len": 200},
    {"q_len": 1, "kv_len": 700, "heads": 8, "kv_heads": 1},
    {"q_len": 130, "kv_len": 1, "batch": 2},
    {"q_len": 64, "kv_len": 128},
    {"q_len": 257, "kv_len": 1153, "batch": 2, "kv_heads": 2},
    {"mask": "bool", "batch": 2, "kv_heads": 2},
    {"mask": "bool keys", "batch": 2},
    {"mask": "bias", "batch": 2},
    {"mask": "bias float32", "batch": 2, "kv_heads": 2},
    {"mask": "bias minima"},
    {"mask": "window", "kv_heads": 2, "q_len": 600, "kv_len": 600},
    {"mask": "lower right", "q_len": 200, "kv_len": 520},
    {"mask": "packed", "q_len": 400, "kv_len": 450},
    {"mask": "holes", "batch": 2, "kv_heads": 2},
    {"mask": "far apart", "kv_heads": 2, "kv_len": 520},
    {"layout": "BNHD", "mask": "causal"},
    {"layout": "fused", "batch": 2},
    {"layout": "expanded", "batch": 2},
    {"layout": "unaligned"},
)


def grid(interpreted: bool = False) -> tuple[Check, ...]:
    """The calls to make; none where `interpreted`, for CUDA C++ has no interpreter.

    `kernel` names the inputs: "" for normal ones, "outliers" for a key channel and value channels of large mean, with
    both kinds of smoothing, "lifted" for many values of one sign, whose sums show the bits that are kept of them.
    """
    if interpreted:
        return ()
    half = (torch.bfloat16, torch.float16)
    checks = [
        Check(dtype, head_dim, mask="causal" if dtype is half[index % 2] else "none", kv_heads=2)
        for index, head_dim in enumerate(_HEAD_DIMS)
        for dtype in half
    ]
    for head_dim, dtype in ((128, half[0]), (64, half[1]), (256, half[0]), (512, half[1])):
        checks += [replace(Check(dtype, head_dim), **feature) for feature in _FEATURES]
    checks += [
        Check(dtype, head_dim, 300, 700, kv_heads=2, kernel="outliers")
        for dtype, head_dim in itertools.product(half, (64, 96, 128, 256, 512))
    ]
    for head_dim in (64, 128, 256, 512):
        long = Check(half[0], head_dim, 2048, 4096, heads=2, kv_heads=1)
        checks += [long, replace(long, kernel="lifted")]
    return tuple(checks)


def _inputs(check: Check, device: torch.device) -> tuple[AttentionInputs, bool]:
    """(canonical inputs, whether values are smoothed)."""
    inputs = build_inputs(replace(check, kernel=""), device)
    outliers = check.kernel == "outliers"
    if outliers:
        key, value = inputs.key.clone(), inputs.value.clone()
        key[..., 3] += 50
        value[..., ::5] += 4
        inputs = replace(inputs, key=key, value=value)
    elif check.kernel == "lifted":
        inputs = replace(inputs, value=inputs.value + 2)
    inputs = replace(inputs, query=aligned(inputs.query), key=aligned(inputs.key), value=aligned(inputs.value))
    return inputs, outliers


def run_check(check: Check, device: torch.device) -> Outcome:
    """Run one call twice and judge it. Whatever the kernel raises is an outcome too."""
    outcome = Outcome(check)
    begin = time.perf_counter()
    try:
        _judge(outcome, check, device)
    except Exception as error:
        outcome.note = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _judge(outcome: Outcome, check: Check, device: torch.device) -> None:
    from ffpa_hf.kernels.cuda import fp8_launch
    from ffpa_hf.kernels.cuda.fp8_configs import config_of

    inputs, smooth_v = _inputs(check, device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    wanted = quantised.quantise_fp8(inputs.query, inputs.key, inputs.value, scale=inputs.scale, smooth_v=smooth_v)
    with nan_in_new_memory():
        operands = fp8_launch.quantise(inputs, config_of(check.head_dim), True, smooth_v, index)
        out, lse, stats = fp8_launch.forward(inputs, True, smooth_v)
        again = fp8_launch.forward(inputs, True, smooth_v)
    differ = differences(operands, wanted, inputs)
    outcome.errors += [(name, float(count), 0.5) for name, count in differ.items()]
    masks = {name: getattr(inputs, name) for name in ("is_causal", "mask", "bias", "row_start", "row_end", "key_mask")}
    reference, reference_lse = quantised.quantised_attention(
        inputs.query, inputs.key, inputs.value, scale=inputs.scale, smooth_v=smooth_v, **masks
    )
    exact, _ = attention(*wanted.dequantised(), scale=abs(inputs.scale), **masks)
    allowed, single_allowed = distances(reference, exact)
    whole, single = distances(out, exact)
    rounding = ROUNDING[check.dtype]
    lost = _LOST if check.kernel == "lifted" else 0.0
    outcome.errors.append(("out", whole, math.hypot(_OVER * allowed, rounding / 2) + lost))
    outcome.errors.append(("out (one element)", single, 2 * single_allowed + 2 * rounding + lost))
    dead = reference_lse == -torch.inf
    off = (lse.double() - reference_lse).masked_fill(dead, 0.0).abs().amax() if lse.numel() else torch.zeros(())
    tallest = max(1.0, float(reference_lse.masked_fill(dead, 0.0).abs().amax()))
    outcome.errors.append(("lse", float(off) / tallest, _LSE_LIMIT))
    faults = []
    if not torch.equal(lse == -torch.inf, dead):
        faults.append("rows without keys are others")
    if stats.numel():
        total = (stats[0] + stats[1]) * math.log(2.0)
        if not torch.allclose(total, lse, rtol=1e-5, atol=1e-5):
            faults.append("row statistics are not those of lse")
    if not all(torch.equal(one, two) for one, two in zip((out, lse, stats), again, strict=True)):
        faults.append("results differ when run again")
    outcome.note = "; ".join(faults)
    outcome.passed = not faults and all(error <= limit for _, error, limit in outcome.errors)


# --- tiles back to tensors --------------------------------------------------------------------------------------------


def _unswizzled(tiles: Tensor) -> Tensor:
    """Rows of 64 or 128 bytes with their 16-byte pieces in order; the last two dims are rows and bytes."""
    rows, width = tiles.shape[-2:]
    row = torch.arange(rows, device=tiles.device)[:, None]
    turn = row & 7 if width == 128 else (row >> 1) & 3
    piece = torch.arange(width // 16, device=tiles.device)[None]
    return tiles.unflatten(-1, (-1, 16))[..., row, piece ^ turn, :].flatten(-2)


def row_codes(tiles: Tensor) -> Tensor:
    """Query or key tiles `[..., blocks, chunks, rows, width]` as `[..., blocks * rows, chunks * width]`."""
    return _unswizzled(tiles).transpose(-3, -2).flatten(-2).flatten(-3, -2)


def value_codes(tiles: Tensor) -> Tensor:
    """Value tiles `[V, tiles, D, 128]` as `[V, tiles * 128, D]`, keys in their own order."""
    places = _unswizzled(tiles).unflatten(-1, (-1, quantised.ORDER_GROUP))
    keys = torch.empty_like(places)
    keys[..., quantised.value_order(tiles.device)] = places
    return keys.flatten(-2).transpose(-1, -2).flatten(1, 2)


def differences(operands: Operands, wanted: quantised.FP8, inputs: AttentionInputs) -> dict[str, int]:
    """How many numbers of each quantised tensor are not those of the definition, bit for bit."""
    batch, heads, n_q, width = inputs.query.shape
    kv_heads, n_kv = inputs.key.shape[1:3]

    def spread(distinct: Tensor, like: Tensor) -> Tensor:
        """`[distinct heads, ...]` as `[B, Hkv, ...]`."""
        own = [
            size if stride or size == 1 else 1 for size, stride in zip(like.shape[:2], like.stride()[:2], strict=True)
        ]
        return distinct.unflatten(0, own).expand(batch, kv_heads, *distinct.shape[1:])

    key, value = row_codes(operands.key), value_codes(operands.value)
    blocks = wanted.key_scale.shape[-1]
    pairs = {
        "query codes": (row_codes(operands.query)[:, :, :n_q, :width], wanted.query),
        "query scales": (operands.query_scale, wanted.query_scale),
        "key codes": (spread(key, inputs.key)[:, :, :n_kv, :width], wanted.key),
        "key scales": (spread(operands.key_scale, inputs.key)[:, :, :blocks], wanted.key_scale),
        "key mean": (spread(operands.key_mean, inputs.key)[..., :width], wanted.key_mean),
        "value codes": (spread(value, inputs.value)[:, :, :n_kv, :width], wanted.value),
        "value scales": (spread(operands.value_scale, inputs.value)[..., :width], wanted.value_scale),
        "value mean": (spread(operands.value_mean, inputs.value)[..., :width], wanted.value_mean),
    }
    found = {name: int((given != exact).sum()) for name, (given, exact) in pairs.items()}
    # What fills a tile is multiplied too: it must be zeros. Columns behind the built head dim are not.
    size = operands.value.shape[2]
    found["filling"] = sum(
        int((filling & 0x7F).count_nonzero())
        for filling in (
            key[:, n_kv:, :size], key[:, :, width:size], value[:, n_kv:], value[:, :, width:],
            row_codes(operands.query)[..., width:size],
        )
    )  # fmt: skip
    return found
