"""Tiles of the FP8 kernels: frozen configs, and the table that chooses one by head dim.

Pure functions of plain numbers: imports neither torch nor a CUDA package, asks no device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

#: Query rows of a warpgroup, keys of a tile, as in src/fp8.cuh.
ROW_BLOCK, KEY_TILE = 64, 128
#: Shared memory per block on Hopper, bytes.
SMEM_LIMIT = 227 * 1024


@dataclass(frozen=True)
class Config:
    """One block of src/fp8_forward.cu, for head dims up to `head_dim`.

    slices: blocks that share the output columns. groups: warpgroups of 64 query rows. k_slots: ring slots of 128 keys x
    128 columns. v_slots: of 128 keys of a slice's values. promote: products with the values are summed in fp32 from
    step to step, instead of in the tensor core. fold: without it, steps after which the tensor core's sums are emptied
    into fp32 ones; 0: never. turns: warpgroups take turns at the tensor core.
    """

    head_dim: int
    slices: int = 1
    groups: int = 2
    k_slots: int = 4
    v_slots: int = 3
    promote: bool = False
    fold: int = 0
    turns: bool = True
    polynomial: int = 0

    @property
    def block_m(self) -> int:
        """Query rows of one block."""
        return ROW_BLOCK * self.groups

    @property
    def threads(self) -> int:
        """Threads of one block: a warpgroup that loads, and those that compute."""
        return 128 * (self.groups + 1)

    @property
    def chunk_width(self) -> int:
        """Bytes of a row of a query or key tile."""
        return 64 if self.head_dim == 64 else 128

    @property
    def chunks(self) -> int:
        """Tiles side by side that hold a head dim."""
        return -(-self.head_dim // self.chunk_width)

    @property
    def smem(self) -> int:
        """Dynamic shared memory in bytes, as src/fp8_forward.cu lays it out."""
        tiles = self.groups * self.chunks * ROW_BLOCK * self.chunk_width
        tiles += self.k_slots * KEY_TILE * self.chunk_width + self.v_slots * self.head_dim // self.slices * KEY_TILE
        return tiles + 8 * (2 * self.k_slots + 2 * self.v_slots + 1)


#: One row per built head dim; others run in the next one, with zeros behind their last column.
CONFIGS: tuple[Config, ...] = (
    Config(64, groups=3, k_slots=4, v_slots=4),
    Config(96, k_slots=4, v_slots=4),
    Config(128, k_slots=4, v_slots=4),
    Config(160, k_slots=6, v_slots=3),
    Config(192, k_slots=6, v_slots=3),
    Config(256, k_slots=6, v_slots=3),
    Config(320, slices=2, k_slots=6, v_slots=3),
    Config(384, slices=2, k_slots=6, v_slots=3),
    Config(512, slices=2, k_slots=6, v_slots=2),
)


@functools.lru_cache(maxsize=512)
def config_of(head_dim: int) -> Config:
    """The kernel for a head dim. Raises ValueError above 512."""
    for config in CONFIGS:
        if head_dim <= config.head_dim:
            return config
    raise ValueError(f"no FP8 kernel is built for head_dim {head_dim}")


#: Output columns of a block whose two warpgroups have registers for sums beside the tensor core's.
_FOLDED_COLUMNS = 128
#: Steps of 128 keys: over so many the tensor core's sums lose less than 1%, where rounding to e4m3 costs 5%.
_FOLD = 4


@functools.lru_cache(maxsize=512)
def choose(head_dim: int, reads_masks: bool, fast_accum: bool = False) -> Config:
    """The kernel for a head dim. reads_masks: a mask, bias or key mask is read per element, which needs registers that
    an unpromoted output of more than 160 columns does not leave. fast_accum: sums stay in the tensor core."""
    config = config_of(head_dim)
    columns = config.head_dim // config.slices
    if fast_accum and not (reads_masks and columns > 160):
        return config
    if columns <= _FOLDED_COLUMNS and not reads_masks:
        return replace(config, fold=_FOLD, groups=2)
    return replace(config, promote=True, turns=False)
