"""Tiles of the CUDA C++ kernels: frozen configs, what makes one legal, and the tables that choose one.

Pure functions of plain numbers: imports neither torch nor a CUDA package, asks no device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

#: Columns of a shared-memory chunk: 128 bytes of 16-bit elements, one swizzle row.
CHUNK = 64
#: Output columns of one block at most: 128 fp32 accumulators per thread of a 64-row tile on 8 warps.
WIDEST_SLICE = 512


@dataclass(frozen=True)
class NativeConfig:
    """One block of the native forward (src/native_forward.cu).

    row_warps: groups of 16 query rows. col_warps: warps that share a group. block_n: keys per step. stages: slots of
    the shared-memory ring, of `step` chunks each. q_resident: the query tile stays in shared memory. blocks: resident
    per multiprocessor.
    """

    row_warps: int
    col_warps: int
    block_n: int
    stages: int
    step: int = 1
    q_resident: bool = True
    blocks: int = 1

    @property
    def block_m(self) -> int:
        """Query rows of one block."""
        return 16 * self.row_warps

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 32 * self.row_warps * self.col_warps


def chunks_of(head_dim: int) -> int:
    """64-column chunks that cover a head dim; the last may be partly empty."""
    return -(-head_dim // CHUNK)


def slices_of(head_dim: int) -> tuple[int, int]:
    """(slices, output chunks of each): blocks that share a query tile, as few as registers allow."""
    slices = -(-head_dim // WIDEST_SLICE)
    return slices, -(-chunks_of(head_dim) // slices)


def native_smem(config: NativeConfig, head_dim: int) -> int:
    """Dynamic shared memory of a block in bytes, as src/native_forward.cu lays it out."""
    query, step = config.block_m * 128, config.block_n * 128
    resident = chunks_of(head_dim) * query if config.q_resident else 0
    ring = config.stages * config.step * (step + (0 if config.q_resident else query))
    shared_rows = config.block_m * config.block_n * 2 if config.col_warps > 1 else 0
    return resident + ring + shared_rows + config.col_warps * config.block_m * 4 + 16 * config.row_warps


def is_legal(config: NativeConfig, head_dim: int, smem_limit: int) -> bool:
    """Whether a config fits a device with `smem_limit` bytes of shared memory per block."""
    _, width = slices_of(head_dim)
    outputs = width * 32 // config.col_warps  # fp32 values per thread
    scores = config.block_n // config.col_warps // 2
    weights = config.block_n // 4
    return (
        outputs + scores + weights <= 200
        and config.block_n // config.col_warps % 16 == 0
        and config.col_warps in (1, 2)
        and config.stages >= 2
        and config.threads <= 1024
        and native_smem(config, head_dim) <= smem_limit
    )


# (head dim up to, config); the first legal one is taken.
_NATIVE: tuple[tuple[int, NativeConfig], ...] = (
    (64, NativeConfig(4, 1, 128, 3, blocks=2)),
    (128, NativeConfig(4, 1, 128, 2, step=2)),
    (256, NativeConfig(4, 1, 64, 2, step=4)),
    (256, NativeConfig(4, 1, 64, 3, step=2)),
    (320, NativeConfig(4, 2, 128, 2, step=5)),
    (512, NativeConfig(4, 2, 128, 2, step=4)),
    (512, NativeConfig(4, 2, 64, 3)),
    (1024, NativeConfig(4, 2, 128, 2, step=4, q_resident=False)),
    (1024, NativeConfig(4, 2, 64, 2, step=4, q_resident=False)),
    (1024, NativeConfig(4, 2, 64, 4, q_resident=False)),
)


@functools.lru_cache(maxsize=256)
def choose_native(head_dim: int, smem_limit: int) -> NativeConfig:
    """The native forward's config. Raises ValueError where no row of the table fits."""
    for limit, config in _NATIVE:
        if head_dim <= limit and is_legal(config, head_dim, smem_limit):
            return config
    raise ValueError(f"no native CUDA tile fits head_dim {head_dim} in {smem_limit} bytes of shared memory")


@dataclass(frozen=True)
class TmaConfig:
    """One block of the single-block forward for Hopper (src/tma_forward.cu).

    block_n: keys per step. groups: warpgroups that compute 64 rows each. piece: 64-column chunks in a slot of the ring.
    stages: slots. turns: warpgroups start their products in turn.
    """

    block_n: int
    groups: int
    piece: int
    stages: int
    turns: bool = False

    @property
    def block_m(self) -> int:
        """Query rows of one block."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 128 * (self.groups + 1)


@dataclass(frozen=True)
class TwinConfig:
    """One block of the two-block forward for Hopper (src/twin_forward.cu).

    keys: that a block scores per step, half of those of the step. piece, stages: as in `TmaConfig`. late: the other
    block's probabilities are multiplied a step later.
    """

    keys: int
    piece: int
    stages: int
    late: bool = False

    block_m = 128
    threads = 384


def tma_smem(config: TmaConfig, head_dim: int) -> int:
    """Dynamic shared memory in bytes, as src/tma_forward.cu lays it out: query tile, ring, barriers."""
    ring = config.stages * config.piece * config.block_n * 128
    return chunks_of(head_dim) * config.block_m * 128 + ring + 8 * (2 * config.stages + 2)


def twin_smem(config: TwinConfig, head_dim: int) -> int:
    """Dynamic shared memory of a block in bytes: query tile, ring, mail, barriers, sums (src/twin_forward.cu)."""
    ring = config.stages * config.piece * config.keys * 128
    mail = 2 * (config.keys // 16 * 2048 + 1024)
    return chunks_of(head_dim) * config.block_m * 128 + ring + mail + 8 * (2 * config.stages + 5) + 512


def half_of(head_dim: int) -> int:
    """Output columns of a block of the twin forward: half of them, in whole sixteens."""
    return -(-head_dim // 32) * 16


#: The widest head dims of the forwards for Hopper's own instructions: one block, two blocks.
WIDEST_TMA = 320
WIDEST_TWIN = 512
#: Rows from which family "auto" prefers them: fewer leave most of a tile empty.
TMA_ROWS = 128

# By 64-column chunks of the head dim: the config, the one for causal calls, and the one for calls with a mask or bias,
# which take more registers.
_TMA: dict[int, tuple[TmaConfig, TmaConfig, TmaConfig]] = {
    1: (TmaConfig(128, 3, 1, 8, turns=True), TmaConfig(128, 3, 1, 8, turns=True), TmaConfig(96, 3, 1, 8)),
    2: (TmaConfig(176, 2, 2, 4, turns=True), TmaConfig(128, 2, 2, 6, turns=True), TmaConfig(128, 2, 2, 6)),
    3: (TmaConfig(112, 2, 3, 4), TmaConfig(128, 2, 3, 3), TmaConfig(112, 2, 3, 4)),
    4: (TmaConfig(80, 2, 4, 4, turns=True), TmaConfig(80, 2, 4, 4), TmaConfig(80, 2, 4, 4)),
    5: (TmaConfig(64, 2, 3, 6), TmaConfig(64, 2, 3, 6), TmaConfig(48, 2, 3, 8)),
}
# The config, and the one for causal calls.
_TWIN: dict[int, tuple[TwinConfig, TwinConfig]] = {
    6: (TwinConfig(64, 3, 4, late=True), TwinConfig(64, 3, 4, late=True)),
    7: (TwinConfig(64, 2, 6), TwinConfig(64, 2, 6, late=True)),
    8: (TwinConfig(64, 2, 5), TwinConfig(64, 2, 5, late=True)),
}


def choose_tma(head_dim: int, causal: bool = False, masked: bool = False) -> TmaConfig:
    """The single-block forward's config for a head dim of at most `WIDEST_TMA`. masked: with a mask or bias."""
    return _TMA[chunks_of(head_dim)][2 if masked else causal]


def choose_twin(head_dim: int, causal: bool = False) -> TwinConfig:
    """The twin forward's config for a head dim above `WIDEST_TMA`, at most `WIDEST_TWIN`."""
    return _TWIN[chunks_of(head_dim)][causal]


def takes_hopper(family: str, head_dim: int, q_len: int, drops: bool, is_hopper: bool) -> bool:
    """Whether a forward for Hopper's own instructions serves a call of the CUDA backend, else the native one."""
    if family != "auto":
        return family == "tma"
    return is_hopper and head_dim <= WIDEST_TWIN and q_len >= TMA_ROWS and not drops


def smem_limit_of(capability: tuple[int, int]) -> int:
    """Shared memory per block in bytes on a GPU of this compute capability."""
    if capability[0] in (9, 10):
        return 227 * 1024
    return 163 * 1024 if capability in ((8, 0), (8, 7)) else 99 * 1024
