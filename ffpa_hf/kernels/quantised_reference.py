"""The definition of quantised attention, in plain torch: codes and scales bit for bit, products in float32 or float64.

FP8 (e4m3) is what `kernels/cuda` runs on Hopper; NVFP4 (e2m1 with ue4m3 scales) is the definition alone. Kernels must
give the same codes and scales, and outputs no worse than these. Knows no backend and no GPU.

Every operation that decides a code is one IEEE float32 addition, multiplication, division or rounding in a stated
order, so that any device gets the same bits. Where numbers are not finite: NaN stays NaN, an infinity becomes the
largest code, and neither takes part in a mean or a scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ffpa_hf.kernels.reference import hidden_keys

#: Keys that share a scale.
KEY_BLOCK = 64
#: Keys of one column of a value tile, the group of keys within which they are reordered for the tensor core.
VALUE_BLOCK, ORDER_GROUP = 128, 16
#: Tokens whose sums are formed first, and the strands that each sum is split into.
CHUNK, STRANDS = 128, 8
#: Largest e4m3 and e2m1 numbers (OCP 8-bit floating point, table 2; OCP microscaling formats, table 5).
E4M3_MAX, E2M1_MAX = 448.0, 6.0
#: A probability p is rounded as p * 2^8: the largest is then at most 256, and 2^-14 is still a normal e4m3 number.
PROBABILITY_SHIFT = 8
#: Neighbours that share an NVFP4 scale.
FP4_GROUP = 16
_LEAST = 2.0**-100  # of a largest magnitude: its reciprocal is finite
_LOG2E, _LN2 = 1.4426950408889634, 0.6931471805599453

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway points below which a magnitude rounds down; the point itself too where the lower neighbour's code is even.
_E2M1_HALFWAY = ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True))


class FP8(NamedTuple):
    """Query, key and value as e4m3 codes: x = code * scale (+ mean for values; key means cancel in the softmax).

    query uint8 `[B, Hq, Nq, D]`, query_scale float32 `[B, Hq, Nq]`; key `[B, Hkv, Nkv, D]`, key_scale
    `[B, Hkv, ceil(Nkv / 64)]`, key_mean `[B, Hkv, D]`; value `[B, Hkv, Nkv, D]`, value_scale and value_mean
    `[B, Hkv, D]`.
    """

    query: Tensor
    query_scale: Tensor
    key: Tensor
    key_scale: Tensor
    key_mean: Tensor
    value: Tensor
    value_scale: Tensor
    value_mean: Tensor

    def dequantised(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        """(query, key, value) that the codes stand for, key without its mean and value with its own."""
        block = self.key_scale.to(dtype).repeat_interleave(KEY_BLOCK, -1)[..., : self.key.shape[2], None]
        value = e4m3_value(self.value).to(dtype) * self.value_scale.to(dtype)[:, :, None]
        return (
            e4m3_value(self.query).to(dtype) * self.query_scale.to(dtype)[..., None],
            e4m3_value(self.key).to(dtype) * block,
            value + self.value_mean.to(dtype)[:, :, None],
        )


class FP4(NamedTuple):
    """Query, key and value as e2m1 codes in two-level scales: x = code * group scale * scale (+ mean for values).

    Codes uint8 in 0..15, one a byte; group scales uint8 (ue4m3 codes) for 16 neighbours: along the head dim for query
    `[B, Hq, Nq, D/16]` and key, along the keys for value `[B, Hkv, ceil(Nkv/16), D]`. The second-level scales and the
    means are those of `FP8`, except that key_scale holds one for each 64 keys of a code range of 6 * 448.
    """

    query: Tensor
    query_group: Tensor
    query_scale: Tensor
    key: Tensor
    key_group: Tensor
    key_scale: Tensor
    key_mean: Tensor
    value: Tensor
    value_group: Tensor
    value_scale: Tensor
    value_mean: Tensor

    def dequantised(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        """(query, key, value) that the codes stand for, key without its mean and value with its own."""
        kv_len = self.key.shape[2]
        block = self.key_scale.to(dtype).repeat_interleave(KEY_BLOCK, -1)[..., :kv_len, None]
        query, key, value = self._products()
        return (
            query.to(dtype) * self.query_scale.to(dtype)[..., None],
            key.to(dtype) * block,
            value.to(dtype) * self.value_scale.to(dtype)[:, :, None] + self.value_mean.to(dtype)[:, :, None],
        )

    def _products(self) -> tuple[Tensor, Tensor, Tensor]:
        """code * group scale, exact in float32: what the block-scaled product of the tensor core multiplies."""
        grouped = [
            (self.query, e4m3_value(self.query_group).repeat_interleave(FP4_GROUP, -1)),
            (self.key, e4m3_value(self.key_group).repeat_interleave(FP4_GROUP, -1)),
            (self.value, e4m3_value(self.value_group).repeat_interleave(FP4_GROUP, -2)[:, :, : self.value.shape[2]]),
        ]
        query, key, value = (e2m1_value(code) * group for code, group in grouped)
        return query, key, value


# --- number formats ---------------------------------------------------------------------------------------------------


def e4m3_code(x: Tensor) -> Tensor:
    """float32 to e4m3, to the nearest, ties to even, saturating at 448; every NaN is 0x7f. uint8, shape of x.

    The conversion of PTX's `cvt.rn.satfinite.e4m3x2.f32`.
    """
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, code)


def e4m3_value(code: Tensor) -> Tensor:
    """The float32 numbers that uint8 e4m3 codes stand for."""
    return code.view(torch.float8_e4m3fn).float()


def e2m1_code(x: Tensor) -> Tensor:
    """float32 to e2m1, to the nearest, ties to even, saturating at 6; NaN is 6 (the format has none). uint8 0..15.

    The conversion of PTX's `cvt.rn.satfinite.e2m1x2.f32`.
    """
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for halfway, down in _E2M1_HALFWAY:
        code += magnitude > halfway if down else magnitude >= halfway
    return torch.where(x.isnan(), 7, code | (x.signbit().to(torch.uint8) << 3))


def e2m1_value(code: Tensor) -> Tensor:
    """The float32 numbers that e2m1 codes 0..15 stand for."""
    table = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), device=code.device)
    return table[code.long()]


# --- means and scales -------------------------------------------------------------------------------------------------


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """float32 sum along `dim` in the one order that kernels follow: strand i adds the rows i, i + 8, ... in turn from
    zero, then the strands are added in turn."""
    rows = x.movedim(dim, 0)
    strands = [rows.new_zeros(rows.shape[1:]) for _ in range(STRANDS)]
    for index, row in enumerate(rows):
        strands[index % STRANDS] = strands[index % STRANDS] + row
    total = strands[0]
    for strand in strands[1:]:
        total = total + strand
    return total


def token_mean(x: Tensor) -> Tensor:
    """Mean over the tokens of `[B, H, N, D]`, float32 `[B, H, D]`, finite numbers only and divided by N: chunks of 128
    tokens are summed first, then the chunks, both in the order of `ordered_sum`."""
    length = x.shape[2]
    padded = torch.nn.functional.pad(_finite(x.float()), (0, 0, 0, -length % CHUNK))
    chunks = ordered_sum(padded.unflatten(2, (-1, CHUNK)), 3)
    return _finite(_quotient(ordered_sum(chunks, 2), max(length, 1)))


def _quotient(x: Tensor, divisor: float) -> Tensor:
    """x / divisor rounded once; with a plain number torch would multiply by its rounded inverse on some devices."""
    return x / torch.full((1,) * max(x.dim(), 1), divisor, dtype=x.dtype, device=x.device)


def _scale(largest: Tensor, top: float) -> Tensor:
    """What one unit of a code with largest magnitude `top` is worth, where the data reach `largest`."""
    return _quotient(largest.clamp(_LEAST, torch.finfo(torch.float32).max), top)


def _largest(x: Tensor, dims: tuple[int, ...], original: Tensor | None = None) -> Tensor:
    """Largest magnitude of x where `original`, of which x is the difference to a mean, is finite."""
    return torch.where((x if original is None else original).isfinite(), x.abs(), 0.0).amax(dims)


def _shifted(
    query: Tensor, key: Tensor, value: Tensor, scale: float, smooth_k: bool, smooth_v: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """float32 (query, key, value) as they are rounded, and the means that were taken off key and value."""
    query, key, value = query.float(), key.float(), value.float()
    key_mean = token_mean(key) if smooth_k else key.new_zeros(key.shape[:2] + key.shape[3:])
    value_mean = token_mean(value) if smooth_v else value.new_zeros(value.shape[:2] + value.shape[3:])
    # A negative softmax scale turns the query, so that kernels may take the largest product for the largest score.
    return (
        -query if scale < 0 else query,
        key - key_mean[:, :, None],
        value - value_mean[:, :, None],
        key_mean,
        value_mean,
    )


def _key_blocks(key: Tensor) -> Tensor:
    """`[B, H, N, D]` as `[B, H, blocks, 64, D]`, zeros behind the last key."""
    return torch.nn.functional.pad(key, (0, 0, 0, -key.shape[2] % KEY_BLOCK)).unflatten(2, (-1, KEY_BLOCK))


def quantise_fp8(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float = 1.0, smooth_k: bool = True, smooth_v: bool = False
) -> FP8:
    """Codes and scales of one call. query `[B, Hq, Nq, D]`, key and value `[B, Hkv, Nkv, D]`, fp16, bf16 or float32.

    A scale is the largest magnitude of what is finite, at least 2^-100, over 448: of one query row, of 64 keys, of one
    channel of the values. A code is x * (1 / scale) rounded to e4m3. smooth_k, smooth_v: take the token mean off first
    (nothing where it is not finite). scale: the softmax scale, of which only the sign matters here. Nkv is positive.
    """
    originals = key, value
    query, key, value, key_mean, value_mean = _shifted(query, key, value, scale, smooth_k, smooth_v)
    query_scale = _scale(_largest(query, (-1,)), E4M3_MAX)
    blocks = _key_blocks(key)
    key_scale = _scale(_largest(blocks, (-2, -1), _key_blocks(originals[0])), E4M3_MAX)
    key_codes = e4m3_code(blocks * (1.0 / key_scale)[..., None, None]).flatten(2, 3)[:, :, : key.shape[2]]
    value_scale = _scale(_largest(value, (-2,), originals[1]), E4M3_MAX)
    return FP8(
        e4m3_code(query * (1.0 / query_scale)[..., None]),
        query_scale,
        key_codes,
        key_scale,
        key_mean,
        e4m3_code(value * (1.0 / value_scale)[:, :, None]),
        value_scale,
        value_mean,
    )


def _grouped(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """e2m1 codes `[..., D]` and ue4m3 group scales `[..., D / 16]` of x, whose second-level scale broadcasts against x.

    A group that holds a NaN gets a NaN for a scale, for e2m1 has none.
    """
    relative = (x * (1.0 / scale)).unflatten(-1, (-1, FP4_GROUP))
    largest = _finite(relative).abs().amax(-1)
    group = e4m3_code(torch.where(relative.isnan().any(-1), torch.nan, largest * (1.0 / E2M1_MAX)))
    worth = e4m3_value(group)[..., None]
    code = e2m1_code(torch.where(worth == 0.0, 0.0, relative * (1.0 / worth)))
    return code.flatten(-2), group


def quantise_fp4(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float = 1.0, smooth_k: bool = True, smooth_v: bool = False
) -> FP4:
    """NVFP4 codes and scales of one call; arguments as for `quantise_fp8`, D a multiple of 16.

    The second-level scale is the largest finite magnitude over 6 * 448, of the rows, blocks and channels of FP8.
    A group's scale is its largest magnitude over 6, in those units, rounded to ue4m3.
    """
    originals = key, value
    query, key, value, key_mean, value_mean = _shifted(query, key, value, scale, smooth_k, smooth_v)
    top = E2M1_MAX * E4M3_MAX
    query_scale = _scale(_largest(query, (-1,)), top)
    query_codes, query_group = _grouped(query, query_scale[..., None])
    blocks = _key_blocks(key)
    key_scale = _scale(_largest(blocks, (-2, -1), _key_blocks(originals[0])), top)
    key_codes, key_group = (
        part.flatten(2, 3)[:, :, : key.shape[2]] for part in _grouped(blocks, key_scale[..., None, None])
    )
    value_scale = _scale(_largest(value, (-2,), originals[1]), top)
    columns = torch.nn.functional.pad(value, (0, 0, 0, -value.shape[2] % FP4_GROUP)).transpose(-1, -2)
    value_codes, value_group = (part.transpose(-1, -2) for part in _grouped(columns, value_scale[..., None]))
    return FP4(
        query_codes, query_group, query_scale, key_codes, key_group, key_scale, key_mean,
        value_codes[:, :, : value.shape[2]], value_group, value_scale, value_mean,
    )  # fmt: skip


# --- attention --------------------------------------------------------------------------------------------------------


def quantised_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    precision: str = "fp8",
    smooth_k: bool = True,
    smooth_v: bool = False,
    is_causal: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    key_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention as FP8 ("fp8") or NVFP4 ("fp4") kernels compute it; returns (out, log-sum-exp), both in `dtype`.

    Arguments and results as in `reference.attention`. Scores are products of codes, scaled; with r the largest score of
    a row in base 2, rounded up to a whole number, probabilities are exp2(score - r + 8) rounded to e4m3, or, for NVFP4,
    6 * 448 * exp2(score - r) rounded in groups of 16 keys. r being whole, its choice moves no code but the subnormal
    ones. FP8 divides by the sum before rounding, NVFP4 by the sum after it. Nothing else is rounded below `dtype`.
    """
    operands: FP8 | FP4
    if precision == "fp8":
        operands = quantise_fp8(query, key, value, scale=scale, smooth_k=smooth_k, smooth_v=smooth_v)
    elif precision == "fp4":
        operands = quantise_fp4(query, key, value, scale=scale, smooth_k=smooth_k, smooth_v=smooth_v)
    else:
        raise ValueError(f"precision={precision!r} is not defined; use 'fp8' or 'fp4'.")
    group = query.shape[1] // key.shape[1]
    q, k, v = operands.dequantised(dtype)
    mean = operands.value_mean.to(dtype)[:, :, None]
    k, v, mean = (x.repeat_interleave(group, 1) for x in (k, v - mean, mean))
    scores = (q @ k.transpose(-1, -2)) * abs(scale) * _LOG2E
    if bias is not None:
        scores = scores + (bias.to(dtype) * _LOG2E).clamp(min=-3.3e38).masked_fill(bias == -torch.inf, -torch.inf)
    hidden = hidden_keys(query.shape[2], key.shape[2], query.device, is_causal, mask, row_start, row_end, key_mask)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    reference = scores.amax(-1, keepdim=True).ceil()
    reference = reference.masked_fill(reference == -torch.inf, 0.0)
    if precision == "fp8":
        weights = torch.exp2(scores - reference + PROBABILITY_SHIFT)
        total = weights.sum(-1, keepdim=True)
        rounded = e4m3_value(e4m3_code(weights.float())).to(dtype)
        offset = float(PROBABILITY_SHIFT)
    else:
        weights = torch.exp2(scores - reference) * (E2M1_MAX * E4M3_MAX)
        rounded = _rounded_to_fp4(weights.float()).to(dtype)
        total = rounded.sum(-1, keepdim=True)
        offset = torch.tensor(E2M1_MAX * E4M3_MAX, dtype=dtype).log2().item()
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    total = total.masked_fill(empty, 1.0)
    out = (rounded @ v / total + mean).masked_fill(empty, 0.0)
    lse = (reference - offset + torch.log2(total)) * _LN2
    if smooth_k:  # the mean moved every score of a row by the same amount
        moved = query.to(dtype) @ operands.key_mean.to(dtype).repeat_interleave(group, 1)[..., None]
        lse = lse + scale * torch.where(moved.isfinite(), moved, 0.0)
    return out, lse.masked_fill(empty, -torch.inf).squeeze(-1)


def _rounded_to_fp4(weights: Tensor) -> Tensor:
    """Non-negative weights `[..., N]` rounded to e2m1 times ue4m3, a scale for each 16 of the last dim."""
    length = weights.shape[-1]
    padded = torch.nn.functional.pad(weights, (0, -length % FP4_GROUP))
    code, group = _grouped(padded, torch.ones((), device=weights.device))
    return (e2m1_value(code) * e4m3_value(group).repeat_interleave(FP4_GROUP, -1))[..., :length]


def value_order(device: torch.device | str | None = None) -> Tensor:
    """int64 `[16]`: which key of 16 stands at each place of a value row in the kernels' order.

    A thread of the tensor core holds the scores of keys 2t, 2t + 1, 8 + 2t, 9 + 2t and multiplies places 4t..4t + 3
    (PTX 9.7.15, wgmma fragments of 32-bit accumulators and of 8-bit operands): values in this order need no exchange.
    """
    place = torch.arange(ORDER_GROUP, device=device)
    thread, element = place // 4, place % 4
    return 8 * (element // 2) + 2 * thread + element % 2
