"""Which probabilities dropout keeps: one counter map, in plain torch, that every kernel backend repeats bit for bit.

Knows no kernel. Philox 4x32-10 is the generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def drop_threshold(dropout_p: float) -> int:
    """The probability as a 32-bit integer: a random word below it is dropped. `dropout_p` in [0, 1]."""
    return round(dropout_p * 2**32)


def philox_words(counters: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, ...]:
    """Four random words for each counter; all int64 tensors holding values in [0, 2^32). `seed` is an int64 scalar."""
    c0, c1, c2, c3 = counters
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def philox_keep_mask(rng_state: Tensor, batch: int, heads: int, q_len: int, kv_len: int, dropout_p: float) -> Tensor:
    """Bool `[B, Hq, Nq, Nkv]`: the probabilities that dropout keeps.

    rng_state: int64 [2], seed and offset, on the device of the result. Element (b, h, q, k) is word `k % 4` of Philox
    with key = seed and counter = (k // 4, q, b * Hq + h, low 32 bits of offset); it is kept where that word is at least
    `drop_threshold(dropout_p)`.
    """
    device = rng_state.device
    quads = (kv_len + 3) // 4
    lane = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    row = torch.arange(q_len, device=device).view(1, 1, -1, 1)
    quad = torch.arange(quads, device=device).view(1, 1, 1, -1)
    shape = (batch, heads, q_len, quads)
    counters = (
        quad.expand(shape),
        row.expand(shape),
        (lane & _LOW).expand(shape),
        (rng_state[1] & _LOW).expand(shape),
    )
    words = torch.stack(philox_words(counters, rng_state[0]), -1)
    return (words >= drop_threshold(dropout_p)).reshape(batch, heads, q_len, quads * 4)[..., :kv_len]


def _multiply(value: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, without leaving int64's positive range."""
    low_part = value * (constant & 0xFFFF)
    upper = value * (constant >> 16) + (low_part >> 16)  # the product without its low 16 bits, below 2^49
    return upper >> 16, ((upper & 0xFFFF) << 16) | (low_part & 0xFFFF)
