"""What drifts between releases of CuTe-DSL, in one place. Needs the DSL at import; written against 4.8.1."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import LayoutEnum, hopper_helpers

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


def tiled_mma(dtype, a_source: str, layout: tuple[int, int, int], tile: tuple[int, int], *, value_operand: bool):
    """wgmma over warpgroups. value_operand: the right operand's contiguous dim is its N, else its K."""
    source = warpgroup.OperandSource.RMEM if a_source == "registers" else warpgroup.OperandSource.SMEM
    right = OperandMajorMode.MN if value_operand else OperandMajorMode.K
    return hopper_helpers.make_trivial_tiled_mma(
        dtype, dtype, OperandMajorMode.K, right, cutlass.Float32, layout, tile, source
    )


def smem_layout(dtype, shape: tuple[int, int], stages: int, *, columns_first: bool):
    """[shape, stages] in 128-byte swizzle rows. columns_first: mode 0 is contiguous, else mode 1."""
    layout = LayoutEnum.COL_MAJOR if columns_first else LayoutEnum.ROW_MAJOR
    kind = hopper_helpers.get_smem_layout_atom(layout, dtype, shape[0] if columns_first else shape[1])
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    order = (1, 0, 2) if columns_first else (0, 1, 2)
    return cute.tile_to_shape(atom, (*shape, stages), order=order)


def exp2(x):
    """2**x by the special function unit."""
    return cute.math.exp2(x, fastmath=True)


def log2(x):
    """Base-2 logarithm by the special function unit."""
    return cute.math.log2(x, fastmath=True)
