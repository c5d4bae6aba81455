"""Tile sizes: frozen configs, what makes one legal, and the tables that choose one. Pure functions of plain numbers.

Must not import Triton or ask a device: launcher, tests and tuner all read the same functions on any machine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

#: Usable shared memory per block, in bytes: AMD's 64 KB, then sm_86/89/120, sm_80, sm_90/100.
SMEM_LIMITS = (64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024)

#: Registers of one multiprocessor that a kernel may spend on accumulators, as fp32 values per thread.
_MAX_ACCUMULATOR = 224
#: The same for the backward's scores, which hold the probabilities beside the second product.
_MAX_SCORES = 128


class Target(NamedTuple):
    """What kernels are built for: shared memory per block in bytes, whether tiles go through descriptors (TMA), and
    whether products go through tensor memory (sm_100), where Triton 3.6 and 3.7 cannot compile the wide forward's
    scores and the fused backward takes more shared memory."""

    smem_limit: int
    tma: bool
    tensor_memory: bool = False


def target_for(capability: tuple[int, int] | None, is_rocm: bool = False) -> Target:
    """The target of a compute capability; None is the interpreter, which has room for any tile."""
    if is_rocm:
        return Target(SMEM_LIMITS[0], False)
    if capability is None:
        return Target(SMEM_LIMITS[3], False)
    if capability[0] in (9, 10):
        return Target(SMEM_LIMITS[3], True, tensor_memory=capability[0] == 10)
    return Target(SMEM_LIMITS[2] if capability in ((8, 0), (8, 7)) else SMEM_LIMITS[1], capability[0] > 8)


@dataclass(frozen=True)
class ForwardConfig:
    """block_m query rows and block_n keys per step; chunk: query columns multiplied at a time, 0 for all at once;
    width: most output columns of one program. phased: with intervals, three loops over the keys of which the middle one
    tests no element, else a single one that tests all (a short range then fills its pipeline once)."""

    block_m: int
    block_n: int
    chunk: int
    width: int
    num_warps: int
    num_stages: int
    phased: bool = True


@dataclass(frozen=True)
class ScoresConfig:
    """Backward scores: one block_m x block_n tile per program, chunk columns of the head dim at a time."""

    block_m: int
    block_n: int
    chunk: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ProductConfig:
    """Backward products: block rows of the gradient, width columns at most, step of the contraction."""

    block: int
    width: int
    step: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class WideConfig:
    """The forward for wide heads: scores to scratch, then their product with the values."""

    scores: ScoresConfig
    product: ProductConfig


@dataclass(frozen=True)
class DecodeConfig:
    """block_m packed query rows against block_n keys per step; per_processor: programs that share a multiprocessor,
    which decides the number of splits."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_processor: int


@dataclass(frozen=True)
class BackwardConfig:
    """The three kernels of a backward pass and the one for a bias gradient."""

    scores: ScoresConfig
    query: ProductConfig
    key: ProductConfig
    bias: ScoresConfig


@dataclass(frozen=True)
class KeyValueConfig:
    """The fused kernel of dK and dV: block_n keys of a program, block_m query rows per step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class FusedBackwardConfig:
    """A backward whose dK and dV come from one kernel, which leaves dS for the product that makes dQ."""

    keys: KeyValueConfig
    query: ProductConfig


@dataclass(frozen=True)
class Columns:
    """`slices` programs, each of first + second columns (powers of two; second may be 0), covering a head dim."""

    first: int
    second: int
    slices: int

    @property
    def width(self) -> int:
        """Columns of one program."""
        return self.first + self.second


def power_of_two(value: int) -> int:
    """The least power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


@functools.lru_cache(maxsize=512)
def split_columns(head_dim: int, width: int) -> Columns:
    """Cover `head_dim` columns with as few programs of at most `width` columns as possible, and little padding.

    A part is the largest power of two in it plus the next power of two (16 at least) of the rest: 320 is 256 + 64.
    """
    slices = -(-head_dim // width)
    share = -(-head_dim // slices)
    first = 1 << (share.bit_length() - 1)
    rest = share - first
    second = max(16, power_of_two(rest)) if rest else 0
    if second == first:
        first, second = 2 * first, 0
    return Columns(first, second, -(-head_dim // (first + second)))


def forward_smem(config: ForwardConfig, head_dim: int, itemsize: int, tma: bool) -> int:
    """Shared memory of the forward kernel in bytes, an estimate from above."""
    out = split_columns(head_dim, config.width).width
    probabilities = config.block_m * config.block_n * itemsize
    value = config.block_n * out * itemsize
    if config.chunk:  # the ring is free again when the values arrive
        ring = (config.block_m + config.block_n) * config.chunk * itemsize * config.num_stages
        return max(ring, value + probabilities) + 1024
    inner = split_columns(head_dim, 1 << 20).width
    key = config.block_n * inner * itemsize
    query = config.block_m * inner * itemsize
    if config.num_stages == 1:
        return query + max(key, value) + probabilities
    return query + (key + value) * config.num_stages + probabilities


def scores_smem(config: ScoresConfig, itemsize: int) -> int:
    """Shared memory of the backward's scores kernel in bytes, an estimate from above."""
    ring = (config.block_m + config.block_n) * config.chunk * itemsize * config.num_stages
    return ring + config.block_m * config.block_n * itemsize


def product_smem(config: ProductConfig, head_dim: int, itemsize: int) -> int:
    """Shared memory of a backward product in bytes, an estimate from above."""
    columns = split_columns(head_dim, config.width)
    return (config.block + columns.width) * config.step * itemsize * config.num_stages


def key_value_smem(config: KeyValueConfig, head_dim: int, itemsize: int) -> int:
    """Shared memory of the fused dK, dV kernel in bytes, an estimate from above."""
    width = split_columns(head_dim, head_dim).width
    kept = 2 * config.block_n * width
    passing = 2 * config.block_m * width * config.num_stages
    weights = 2 * config.block_m * config.block_n
    vectors = 4 * 4 * config.block_m * config.num_stages
    return (kept + passing + weights) * itemsize + vectors + 1024


def decode_smem(config: DecodeConfig, head_dim: int, itemsize: int) -> int:
    """Shared memory of the decode kernel in bytes, an estimate from above."""
    width = split_columns(head_dim, head_dim).width
    # A product of 64 rows or more runs while the next step's tiles are already being overwritten.
    buffers = config.num_stages if config.block_m >= 64 else max(1, config.num_stages - 1)
    probabilities = config.block_m * (config.block_n + 16) * itemsize
    return (2 * config.block_n * buffers + config.block_m) * width * itemsize + probabilities


def is_legal(
    config: ForwardConfig | WideConfig | DecodeConfig | BackwardConfig | FusedBackwardConfig,
    head_dim: int,
    smem_limit: int,
    itemsize: int,
    tma: bool,
    busy: bool = False,
) -> bool:
    """Whether a config fits a device with `smem_limit` bytes of shared memory per block.

    The same answer serves launcher, tuner and tests. tma: tiles are loaded through descriptors; their boxes end at 256.
    busy: masks, biases or dropout come along, which change the layout of a forward's tile through shared memory.
    """
    if isinstance(config, FusedBackwardConfig):
        return _is_legal_fused(config, head_dim, smem_limit, itemsize, tma)
    if isinstance(config, BackwardConfig):
        parts = (config.scores, config.bias)
        fits = all(scores_smem(part, itemsize) <= smem_limit for part in parts)
        fits = fits and all(part.block_m * part.block_n // (part.num_warps * 32) <= _MAX_SCORES for part in parts)
        for part in (config.query, config.key):
            columns = split_columns(head_dim, part.width)
            fits = fits and product_smem(part, head_dim, itemsize) <= smem_limit
            fits = fits and part.block * columns.width // (part.num_warps * 32) <= _MAX_ACCUMULATOR
            fits = fits and part.block >= 64
        scores = config.scores
        # The products read whole steps of what the scores kernel writes in whole tiles.
        return fits and scores.block_n % config.query.step == 0 and scores.block_m % config.key.step == 0
    if isinstance(config, WideConfig):
        scores, product = config.scores, config.product
        columns = split_columns(head_dim, product.width)
        fits = max(scores_smem(scores, itemsize), product_smem(product, head_dim, itemsize)) <= smem_limit
        fits = fits and scores.block_m * scores.block_n // (scores.num_warps * 32) <= _MAX_SCORES
        fits = fits and product.block * columns.width // (product.num_warps * 32) <= _MAX_ACCUMULATOR
        # The product reads whole steps of what the scores kernel wrote in whole tiles, in blocks of the same rows.
        return fits and scores.block_n % product.step == 0 and scores.block_m == product.block
    if isinstance(config, DecodeConfig):
        if (
            min(config.block_m, config.block_n) < 16
            or min(config.num_warps, config.num_stages, config.per_processor) < 1
        ):
            return False
        if smem_limit <= SMEM_LIMITS[0] and config.num_stages > 3:
            return False  # Triton 3.6 cannot pipeline as far for AMD
        accumulator = config.block_m * split_columns(head_dim, head_dim).width // (config.num_warps * 32)
        fits = decode_smem(config, head_dim, itemsize) * config.per_processor <= smem_limit
        return fits and accumulator <= _MAX_SCORES
    columns = split_columns(head_dim, config.width)
    if tma and not config.chunk and config.num_stages == 1:
        # Narrow boxes that are not prefetched fault on Hopper (seen at head dims 72 and 96, Triton 3.6).
        tail = split_columns(head_dim, 1 << 20).second
        if 0 < tail < 64:
            return False
    threads = config.num_warps * 32
    accumulator = config.block_m * (columns.width + config.block_n) // threads
    if accumulator > _MAX_ACCUMULATOR or (tma and max(config.block_m, config.block_n) > 256):
        return False
    conversions = 0
    if busy and tma and not config.chunk and config.num_stages > 1:  # else the scratch lies where the tiles were
        conversions = config.block_m * config.block_n * (itemsize + 1) + 1024
    return forward_smem(config, head_dim, itemsize, tma) + conversions <= smem_limit


def _is_legal_fused(config: FusedBackwardConfig, head_dim: int, smem_limit: int, itemsize: int, tma: bool) -> bool:
    keys, query = config.keys, config.query
    inner = split_columns(head_dim, head_dim)
    if tma and 0 < inner.second < 64:  # as in the forward: keys and values are loaded once, before the loop
        return False
    threads = keys.num_warps * 32
    # dK and dV stay, S and dP pass.
    accumulators = (2 * keys.block_n * inner.width + 2 * keys.block_n * keys.block_m) // threads
    columns = split_columns(head_dim, query.width)
    return (
        accumulators <= _MAX_ACCUMULATOR
        and query.block * columns.width // (query.num_warps * 32) <= _MAX_ACCUMULATOR
        and max(key_value_smem(keys, head_dim, itemsize), product_smem(query, head_dim, itemsize)) <= smem_limit
        # dQ reads whole steps of what is written in whole tiles, for tiles of rows that are visited whole.
        and keys.block_n % query.step == 0
        and query.block % keys.block_m == 0
    )


# Rows are tried from the top; the first legal one whose head dim limit covers the call is taken.
# (head dim up to, config). Whole-width products (chunk 0) need the big shared memory of Hopper; with less, operands of
# such a tile would have to wait in registers, and spill.
_FORWARD_TMA: tuple[tuple[int, ForwardConfig], ...] = (
    (256, ForwardConfig(64, 128, 0, 512, 4, 1)),
    (128, ForwardConfig(128, 128, 0, 512, 8, 2)),
    (256, ForwardConfig(128, 64, 0, 512, 8, 2)),
    (320, ForwardConfig(64, 64, 0, 512, 4, 2)),
    (384, ForwardConfig(64, 64, 0, 512, 4, 1)),
    (512, ForwardConfig(64, 128, 0, 512, 8, 1)),
    (1024, ForwardConfig(128, 128, 64, 256, 8, 4)),
)
_FORWARD_PLAIN: tuple[tuple[int, ForwardConfig], ...] = (
    (64, ForwardConfig(128, 64, 0, 512, 4, 3)),
    (128, ForwardConfig(128, 64, 0, 512, 8, 2)),
    (128, ForwardConfig(128, 32, 0, 512, 8, 2)),
    (256, ForwardConfig(128, 64, 64, 512, 8, 3)),
    (512, ForwardConfig(64, 64, 64, 512, 8, 3)),
    (512, ForwardConfig(64, 32, 64, 512, 8, 3)),
    (1024, ForwardConfig(64, 64, 64, 512, 8, 3)),
    (1024, ForwardConfig(64, 32, 64, 512, 8, 2)),
    (1024, ForwardConfig(32, 32, 32, 256, 4, 2)),
    (1024, ForwardConfig(16, 16, 32, 256, 4, 1)),
)
# Few query rows: a small tile wastes less of the products.
_FORWARD_FEW_ROWS: tuple[tuple[int, ForwardConfig], ...] = (
    (256, ForwardConfig(16, 64, 0, 512, 4, 2)),
    (512, ForwardConfig(16, 64, 64, 512, 4, 3)),
    (1024, ForwardConfig(16, 32, 64, 512, 4, 3)),
    (1024, ForwardConfig(16, 16, 32, 256, 4, 1)),
)

#: Query rows from which a call is no longer decoding.
DECODE_BELOW = 8
#: Multiprocessors that `describe` counts with where there is no GPU to ask: an H200's.
ASSUMED_PROCESSORS = 132
# (head dim up to, config); the first legal one is taken. Keys and values of the next steps are on their way while one
# is multiplied: a program is to wait for memory and for nothing else.
_DECODE: tuple[tuple[int, DecodeConfig], ...] = (
    (128, DecodeConfig(16, 64, 4, 3, 2)),
    (256, DecodeConfig(16, 32, 4, 3, 2)),
    (512, DecodeConfig(16, 32, 4, 4, 1)),
    (512, DecodeConfig(16, 32, 4, 3, 1)),
    (512, DecodeConfig(16, 16, 4, 3, 1)),
    (512, DecodeConfig(16, 16, 4, 2, 1)),
    (1024, DecodeConfig(16, 16, 8, 3, 1)),
    (1024, DecodeConfig(16, 16, 8, 2, 1)),
)
_MOST_SPLITS = 256
_DECODE_START = 2  # blocks of keys that could be read while a program starts and leaves its result

# (blocks of rows up to, config) for head dims above _FUSED_UP_TO: many blocks run as two small ones per multiprocessor,
# whose products and exponentials overlap; few blocks need a large tile each. Fewer than _WIDE_BLOCKS leave much idle.
_FUSED_UP_TO = 256
_WIDE_BLOCKS = 96
_WIDE_TMA: tuple[tuple[int, WideConfig], ...] = (
    (160, WideConfig(ScoresConfig(128, 256, 64, 8, 3), ProductConfig(128, 320, 64, 8, 4))),
    (1 << 31, WideConfig(ScoresConfig(128, 128, 64, 4, 3), ProductConfig(128, 320, 64, 8, 4))),
)

_BACKWARD_TMA: tuple[BackwardConfig, ...] = (
    BackwardConfig(
        scores=ScoresConfig(128, 128, 64, 4, 3),
        query=ProductConfig(128, 320, 64, 8, 4),
        key=ProductConfig(128, 320, 64, 8, 4),
        bias=ScoresConfig(64, 64, 64, 4, 2),
    ),
)
_BACKWARD_PLAIN: tuple[BackwardConfig, ...] = (
    BackwardConfig(
        scores=ScoresConfig(128, 128, 64, 8, 3),
        query=ProductConfig(128, 128, 64, 8, 3),
        key=ProductConfig(128, 128, 64, 8, 3),
        bias=ScoresConfig(64, 64, 64, 4, 2),
    ),
    BackwardConfig(
        scores=ScoresConfig(128, 128, 32, 8, 3),
        query=ProductConfig(128, 128, 32, 8, 3),
        key=ProductConfig(128, 128, 32, 8, 3),
        bias=ScoresConfig(64, 64, 32, 4, 2),
    ),
    BackwardConfig(
        scores=ScoresConfig(64, 64, 32, 4, 2),
        query=ProductConfig(64, 128, 32, 4, 2),
        key=ProductConfig(64, 128, 32, 4, 2),
        bias=ScoresConfig(64, 64, 32, 4, 1),
    ),
    BackwardConfig(
        scores=ScoresConfig(64, 64, 16, 4, 1),
        query=ProductConfig(64, 64, 16, 4, 1),
        key=ProductConfig(64, 64, 16, 4, 1),
        bias=ScoresConfig(64, 64, 16, 4, 1),
    ),
)


# Below, busy says that each score carries more work than a range test: a mask, bias, cap or dropout. What that needs
# in registers beside a large tile would spill, so such a tile is spread over twice the warps or made smaller.
_FORWARD_BUSY: tuple[tuple[int, ForwardConfig], ...] = (
    (128, ForwardConfig(128, 64, 0, 512, 8, 2)),
    (256, ForwardConfig(128, 64, 0, 512, 8, 2)),
)
_FORWARD_BUSY_TMA: tuple[tuple[int, ForwardConfig], ...] = (
    (256, ForwardConfig(128, 32, 0, 512, 8, 2)),
    (1024, ForwardConfig(64, 64, 64, 512, 8, 3)),
)


@functools.lru_cache(maxsize=1024)
def choose_forward(
    head_dim: int,
    q_len: int,
    smem_limit: int,
    itemsize: int = 2,
    tma: bool = False,
    busy: bool = False,
    intervals: bool = False,
) -> ForwardConfig:
    """The fused forward's config. Raises ValueError where no row of the tables fits."""
    hopper = tma and smem_limit >= SMEM_LIMITS[3]
    # Three loops of a wide tile spill a little: plain calls are faster in one (H200, a window: 0.56 ms for 0.63).
    one_loop = intervals and hopper and not busy and q_len > 16 and 128 < head_dim <= 256
    tables = (_FORWARD_TMA if hopper else ()) + _FORWARD_PLAIN
    if busy:
        tables = _FORWARD_BUSY + (_FORWARD_BUSY_TMA if hopper else ()) + tables
    if q_len <= 16:
        tables = _FORWARD_FEW_ROWS + tables
    for limit, config in tables:
        if smem_limit == SMEM_LIMITS[0] and config.block_m == 16:
            config = replace(config, num_stages=1)  # Triton 3.6 cannot translate small pipelined tiles for gfx942
        if head_dim <= limit and is_legal(config, head_dim, smem_limit, itemsize, tma, busy):
            return replace(config, phased=False) if one_loop else config
    raise ValueError(f"no Triton forward tile fits head_dim {head_dim} in {smem_limit} bytes of shared memory")


@functools.lru_cache(maxsize=1024)
def choose_decode(head_dim: int, q_len: int, group: int, smem_limit: int, itemsize: int = 2) -> DecodeConfig | None:
    """The split-KV kernel's config, None where there are too many query rows for it or no tile fits.

    group: query heads per key head, whose rows share a tile.
    """
    if not 1 <= q_len < DECODE_BELOW:
        return None
    rows = group * q_len
    while True:
        for limit, config in _DECODE:
            sized = replace(config, **_decode_rows(head_dim, rows))
            if head_dim <= limit and is_legal(sized, head_dim, smem_limit, itemsize, False):
                return sized
        if rows <= 16:
            return None
        rows //= 2


def _decode_rows(head_dim: int, rows: int) -> dict[str, int]:
    """What a tile for `rows` packed rows differs in from the tables' tiles of 16."""
    most = 64 if head_dim <= 256 else 32 if head_dim <= 512 else 16  # the sums of more would not fit in registers
    block_m = min(max(16, power_of_two(rows)), most)
    return {} if block_m == 16 else {"block_m": block_m, "num_warps": 8}


@functools.lru_cache(maxsize=1024)
def for_rows(config: DecodeConfig, head_dim: int, rows: int, smem_limit: int, itemsize: int) -> DecodeConfig:
    """A tuned config, which was timed with few rows, with a tile for `rows` packed rows where that fits."""
    sized = replace(config, **_decode_rows(head_dim, rows))
    return sized if is_legal(sized, head_dim, smem_limit, itemsize, False) else config


def decode_row_tiles(config: DecodeConfig, rows: int) -> int:
    """Row tiles of one key head, whose query heads' rows are packed."""
    return -(-rows // config.block_m)


@functools.lru_cache(maxsize=1024)
def decode_splits(config: DecodeConfig, tiles: int, kv_blocks: int, processors: int) -> int:
    """Programs among which the keys of each row tile are divided: the number that ends soonest.

    tiles: row tiles of all key heads; kv_blocks: blocks of keys. The time of a number is that of its rounds over the
    multiprocessors, each as long as a program's blocks of keys and the start of one.
    """
    places = processors * config.per_processor

    def time(splits: int) -> int:
        return -(-tiles * splits // places) * (-(-kv_blocks // splits) + _DECODE_START)

    return min(range(1, max(1, min(kv_blocks, _MOST_SPLITS)) + 1), key=time)


@functools.lru_cache(maxsize=1024)
def choose_wide(
    head_dim: int, lanes: int, q_len: int, kv_len: int, workspace_mb: int,
    smem_limit: int, itemsize: int = 2, tma: bool = False, busy: bool = False,
) -> WideConfig | None:  # fmt: skip
    """The wide forward's config, None where the fused kernel is the better choice. lanes: batch times query heads."""
    if not tma or head_dim <= _FUSED_UP_TO or q_len <= 64:
        return None
    for limit, config in _WIDE_TMA:
        blocks = min(
            lanes * -(-q_len // config.scores.block_m), _wide_blocks(config.scores, kv_len, itemsize, workspace_mb)
        )
        if busy:
            config = replace(config, scores=replace(config.scores, block_n=128, num_warps=8))
        if _WIDE_BLOCKS <= blocks <= limit and is_legal(config, head_dim, smem_limit, itemsize, tma):
            return config
    return None


def _wide_blocks(config: ScoresConfig, kv_len: int, itemsize: int, workspace_mb: int) -> int:
    """Blocks of rows whose probabilities and rescaling factors fit in `workspace_mb` MiB."""
    return workspace_mb * 2**20 // (config.block_m * -(-kv_len // config.block_n) * (config.block_n * itemsize + 4))


class WideRound(NamedTuple):
    """Row tiles [tile0, tile0 + tiles) of the lanes [lane0, lane0 + lanes); a lane is one (batch, query head)."""

    lane0: int
    lanes: int
    tile0: int
    tiles: int

    @property
    def blocks(self) -> int:
        """Blocks of rows in the round."""
        return self.lanes * self.tiles


@functools.lru_cache(maxsize=512)
def wide_rounds(
    config: WideConfig, lanes: int, q_len: int, kv_len: int, is_causal: bool, itemsize: int, workspace_mb: int,
    processors: int,
) -> tuple[WideRound, ...]:  # fmt: skip
    """The rounds of a wide forward, each within `workspace_mb` MiB of scratch (one block of rows at least).

    Of the round sizes that fit, the one that leaves the fewest of the `processors` idle at the ends of rounds.
    """
    tiles = -(-q_len // config.scores.block_m)
    fits = max(1, _wide_blocks(config.scores, kv_len, itemsize, workspace_mb))
    if fits < tiles:
        return tuple(
            WideRound(lane, 1, tile, min(fits, tiles - tile)) for lane in range(lanes) for tile in range(0, tiles, fits)
        )
    resident = processors * max(1, 8 // config.scores.num_warps)

    def waves(count: int) -> float:
        """Time of all rounds of `count` lanes, in units of the longest block."""
        whole, rest = divmod(lanes, count)

        def one(size: int) -> float:
            return max(1.0, size * tiles / resident / 2) if is_causal else float(-(-size * tiles // resident))

        return whole * one(count) + (one(rest) if rest else 0.0)

    most = min(lanes, fits // tiles)
    count = min(range(most, max(0, most - 64), -1), key=waves)
    return tuple(WideRound(lane, min(count, lanes - lane), 0, tiles) for lane in range(0, lanes, count))


# (head dim up to, config)
_FUSED_BACKWARD_TMA: tuple[tuple[int, FusedBackwardConfig], ...] = (
    (64, FusedBackwardConfig(KeyValueConfig(64, 64, 4, 2), ProductConfig(128, 128, 64, 4, 4))),
    (128, FusedBackwardConfig(KeyValueConfig(64, 64, 4, 2), ProductConfig(128, 128, 64, 4, 3))),
)
_FUSED_BACKWARD_PLAIN: tuple[tuple[int, FusedBackwardConfig], ...] = (
    (128, FusedBackwardConfig(KeyValueConfig(64, 64, 8, 1), ProductConfig(128, 128, 32, 8, 3))),
    (128, FusedBackwardConfig(KeyValueConfig(32, 64, 4, 1), ProductConfig(64, 128, 32, 4, 2))),
    (128, FusedBackwardConfig(KeyValueConfig(32, 32, 4, 1), ProductConfig(64, 128, 32, 4, 2))),
)


@functools.lru_cache(maxsize=1024)
def choose_backward(
    head_dim: int, smem_limit: int, itemsize: int = 2, tma: bool = False, busy: bool = False
) -> BackwardConfig | FusedBackwardConfig:
    """The backward config of a call. Raises ValueError where no row of the tables fits."""
    if not busy:
        for limit, fused in (_FUSED_BACKWARD_TMA if tma else ()) + _FUSED_BACKWARD_PLAIN:
            if head_dim <= limit and is_legal(fused, head_dim, smem_limit, itemsize, tma):
                return fused
    return choose_materialised(head_dim, smem_limit, itemsize, tma, busy)


@functools.lru_cache(maxsize=1024)
def choose_materialised(
    head_dim: int, smem_limit: int, itemsize: int = 2, tma: bool = False, busy: bool = False
) -> BackwardConfig:
    """The config of the backward that keeps P and dS, which serves every call. Raises as `choose_backward`."""
    for config in (_BACKWARD_TMA if tma else ()) + _BACKWARD_PLAIN:
        if is_legal(config, head_dim, smem_limit, itemsize, tma):
            return replace(config, scores=replace(config.scores, num_warps=8)) if busy and tma else config
    raise ValueError(f"no Triton backward tile fits head_dim {head_dim} in {smem_limit} bytes of shared memory")


@dataclass(frozen=True)
class Plan:
    """How a backward pass walks its scratch. A lane is one (batch, query head).

    rounds: (first lane, lanes, first row, rows, first band of its group, last band of its group). heads: lanes of one
    group worked off together. A group that does not fit in one band leaves partial sums in fp32.
    """

    rounds: tuple[tuple[int, int, int, int, bool, bool], ...]
    heads: int
    lanes: int
    rows: int
    cols: int
    matrices: int
    partial_bytes: int
    scratch_bytes: int

    @property
    def banded(self) -> bool:
        """Whether a group takes several bands, so that dK and dV need partial sums."""
        return self.partial_bytes > 0


@functools.lru_cache(maxsize=512)
def plan_backward(
    batch: int, q_heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int,
    *, itemsize: int, matrices: int, partials: int, row_tile: int, key_tile: int, limit: int,
) -> Plan:  # fmt: skip
    """Divide the scores of a call into rounds whose scratch stays below `limit` bytes.

    matrices: 2 where both P and dS are kept, 1 where one is, else 0. partials: fp32 sums [Nkv, D] that a banded group
    needs (dK, dV).
    Whole groups per round where one fits, else bands of whole heads, else bands of rows of one head, down to one row
    tile whatever the limit. Scratch never holds more than one round.
    """
    group = q_heads // kv_heads
    units = batch * kv_heads
    rows = -(-q_len // row_tile) * row_tile
    cols = -(-kv_len // key_tile) * key_tile
    per_row = cols * itemsize * matrices
    per_lane = rows * per_row
    if group * per_lane <= limit:
        per_round = min(units, limit // (group * per_lane)) if per_lane else units
        per_round = -(-units // -(-units // per_round))  # even rounds
        rounds = tuple(
            (unit * group, min(per_round, units - unit) * group, 0, q_len, True, True)
            for unit in range(0, units, per_round)
        )
        lanes = per_round * group
        return Plan(rounds, group, lanes, rows, cols, matrices, 0, lanes * per_lane)

    partial_bytes = partials * kv_len * head_dim * 4
    room = limit - partial_bytes
    heads, band = 1, rows
    if room >= per_lane:
        heads = max(h for h in range(1, group + 1) if group % h == 0 and h * per_lane <= room)
    else:
        band = max(row_tile, room // per_row // row_tile * row_tile)
        bands = -(-rows // band)
        band = -(-rows // bands // row_tile) * row_tile
    rounds_list = []
    for unit in range(units):
        steps = [(h, r) for h in range(0, group, heads) for r in range(0, q_len, band)]
        for number, (head, row) in enumerate(steps):
            first, last = number == 0, number == len(steps) - 1
            rounds_list.append((unit * group + head, heads, row, min(row + band, q_len), first, last))
    banded = group > heads or band < rows
    return Plan(
        tuple(rounds_list), heads, heads, band, cols, matrices, partial_bytes if banded else 0,
        heads * band * per_row + (partial_bytes if banded else 0),
    )  # fmt: skip


def plan_for(
    config: BackwardConfig | FusedBackwardConfig, shape: tuple[int, int, int, int, int, int], itemsize: int,
    needs: tuple[bool, ...], workspace_mb: int,
) -> Plan:  # fmt: skip
    """The plan of a call of shape (B, Hq, Hkv, Nq, Nkv, D) that needs gradients of (query, key, value)."""
    need_q, need_k, need_v = needs
    if isinstance(config, FusedBackwardConfig):
        matrices, row_tile, key_tile = int(need_q), config.query.block, config.keys.block_n
    else:
        matrices = int(need_v) + int(need_q or need_k)
        row_tile = max(config.scores.block_m, config.query.block)
        key_tile = max(config.scores.block_n, config.key.block)
    return plan_backward(
        *shape,
        itemsize=itemsize,
        matrices=matrices,
        partials=int(need_k) + int(need_v),
        row_tile=row_tile,
        key_tile=key_tile,
        limit=workspace_mb * 2**20,
    )
