"""Tiles of the CuTe-DSL forward, and the shared memory that they take. Plain Python: no DSL."""

from __future__ import annotations

from dataclasses import dataclass

#: Query rows of a block: two warpgroups of 64.
ROWS = 128
#: Head dims of the Hopper forward; wider rows do not fit one block's registers.
HEAD_DIMS = (64, 320)
SMEM_LIMIT = 227 * 1024
_BARRIER = 8  # bytes


@dataclass(frozen=True)
class ForwardConfig:
    """One kernel. block_n: keys per step. k_stages, v_stages: steps whose keys and values are held at once."""

    head_dim: int
    dtype: str
    causal: bool
    block_n: int
    k_stages: int
    v_stages: int

    @property
    def width(self) -> int:
        """Columns in shared memory: whole 128-byte swizzle rows; TMA writes zeros past the head dim."""
        return -(-self.head_dim // 64) * 64

    @property
    def value_n(self) -> int:
        """Columns of one product with the values: whole swizzle rows, 256 at most."""
        return max(n for n in (64, 128, 192, 256) if self.width % n == 0)

    @property
    def smem(self) -> int:
        """Dynamic shared memory in bytes, the padding in front of the query tile included."""
        barriers = 1 + 2 * (self.k_stages + self.v_stages)
        assert barriers * _BARRIER <= 1024
        return 1024 + 2 * self.width * (ROWS + self.block_n * (self.k_stages + self.v_stages))


def choose(head_dim: int, dtype: str, causal: bool) -> ForwardConfig:
    """The kernel for a head dim. Raises ValueError outside HEAD_DIMS or off the steps of 8."""
    if not HEAD_DIMS[0] <= head_dim <= HEAD_DIMS[1] or head_dim % 8:
        raise ValueError(f"head_dim {head_dim}: the CuTe-DSL forward takes multiples of 8, 64 to 320")
    width = -(-head_dim // 64) * 64
    block_n, k_stages, v_stages = (128, 2, 2) if width <= 128 else (64, 2, 2) if width <= 256 else (64, 2, 1)
    return ForwardConfig(head_dim, dtype, causal, block_n, k_stages, v_stages)
