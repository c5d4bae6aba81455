"""The forward on Hopper in CuTe-DSL: TMA loads, wgmma, 128 query rows per block.

One warpgroup loads keys and values into rings of `stages` slots; two others take 64 rows each. They start the scores of
the next step, then the values of this one, and work on the softmax of the former while the latter multiplies. Knows no
torch; needs the DSL at import.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from ffpa_hf.kernels.cute import compat
from ffpa_hf.kernels.cute.configs import ROWS, ForwardConfig

_LN2 = math.log(2.0)
#: Exponentials may reach 2**_SLACK before the reference that they are relative to follows the row's maximum.
_SLACK = 8.0
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 24, 240
_LOADED_BY = 128  # threads of the loading warpgroup


class Forward:
    """One compiled kernel: out = softmax(slope * query key^T) value, lse = natural logarithm of the softmax's sum.

    Sources: online softmax (Milakov, Gimelshein 2018), tiled as in FlashAttention (Dao 2022, 2023).
    """

    def __init__(self, config: ForwardConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self, query: cute.Tensor, key: cute.Tensor, value: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
        slope: Float32, group: Int32, by_head: Int32, by_batch: Int32, value_by_head: Int32, value_by_batch: Int32,
        stream,
    ):  # fmt: skip
        """query, out [B, Hq, Nq, D]; key, value [B or 1, Hkv or 1, Nkv, D]; lse fp32 [B, Hq, Nq].

        slope: scale * log2(e), not 0. by_head, by_batch: 0 where key (value) is the same for all heads (batches).
        """
        config = self.config
        dtype = query.element_type
        width = config.width
        q, k = _rows_first(query), _rows_first(key)
        v = _columns_first(value)
        scores_mma = compat.tiled_mma(dtype, "smem", (2, 1, 1), (64, config.block_n), value_operand=False)
        more_mma = compat.tiled_mma(dtype, "smem", (2, 1, 1), (64, config.block_n), value_operand=False)
        values_mma = compat.tiled_mma(dtype, "registers", (2, 1, 1), (64, config.value_n), value_operand=True)
        q_layout = compat.smem_layout(dtype, (ROWS, width), 1, columns_first=False)
        k_layout = compat.smem_layout(dtype, (config.block_n, width), config.k_stages, columns_first=False)
        v_layout = compat.smem_layout(dtype, (width, config.block_n), config.v_stages, columns_first=True)
        op = cpasync.CopyBulkTensorTileG2SOp()
        q_atom, q_tma = cpasync.make_tiled_tma_atom(op, q, cute.select(q_layout, [0, 1]), (ROWS, width))
        k_atom, k_tma = cpasync.make_tiled_tma_atom(op, k, cute.select(k_layout, [0, 1]), (config.block_n, width))
        v_atom, v_tma = cpasync.make_tiled_tma_atom(op, v, cute.select(v_layout, [0, 1]), (width, config.block_n))

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[cutlass.Int64, 1 + 2 * config.k_stages + 2 * config.v_stages]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(v_layout)], 1024]

        self.shared = Shared
        tiles = cute.ceil_div(query.shape[2], ROWS)
        self.kernel(
            q_atom, q_tma, k_atom, k_tma, v_atom, v_tma, out, lse, q_layout, k_layout, v_layout, scores_mma,
            more_mma, values_mma, slope, group, by_head, by_batch, value_by_head, value_by_batch, tiles, key.shape[2],
        ).launch(  # fmt: skip
            grid=(tiles * query.shape[0] * query.shape[1], 1, 1), block=(_LOADED_BY + 256, 1, 1),
            smem=Shared.size_in_bytes(), stream=stream, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, q_tma: cute.Tensor, k_atom: cute.CopyAtom, k_tma: cute.Tensor,
        v_atom: cute.CopyAtom, v_tma: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout, v_layout: cute.ComposedLayout, scores_mma: cute.TiledMma,
        more_mma: cute.TiledMma, values_mma: cute.TiledMma, slope: Float32, group: Int32, by_head: Int32,
        by_batch: Int32, value_by_head: Int32, value_by_batch: Int32, tiles: Int32, n_kv: Int32,
    ):  # fmt: skip
        config = self.config
        block_n, width = config.block_n, config.width
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        n_q, heads = out.shape[2], out.shape[1]
        tile = block % tiles
        if const_expr(config.causal):
            tile = tiles - 1 - tile  # the longest rows first
        i_b, i_h = block // tiles // heads, block // tiles % heads
        row0 = tile * ROWS
        end = n_kv
        if const_expr(config.causal):
            end = cutlass.min(n_kv, row0 + ROWS)
        steps = cute.ceil_div(end, block_n)

        storage = cutlass.utils.SmemAllocator().allocate(self.shared)
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        q_full = storage.barriers.data_ptr()
        k_full, k_empty = q_full + 1, q_full + 1 + config.k_stages
        v_full = k_empty + config.k_stages
        v_empty = v_full + config.v_stages
        if thread == 0:
            cute.arch.mbarrier_init(q_full, 1)
            for i in cutlass.range_constexpr(config.k_stages):
                cute.arch.mbarrier_init(k_full + i, 1)
                cute.arch.mbarrier_init(k_empty + i, 8)  # one arrival of each computing warp
            for i in cutlass.range_constexpr(config.v_stages):
                cute.arch.mbarrier_init(v_full + i, 1)
                cute.arch.mbarrier_init(v_empty + i, 8)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(_PRODUCER_REGISTERS)
            if warp == 0:
                i_kv = i_h // group
                g_q = cute.local_tile(q_tma[None, None, i_h, i_b], (ROWS, width), (tile, 0))
                g_k = cute.local_tile(k_tma[None, None, i_kv * by_head, i_b * by_batch], (block_n, width), (None, 0))
                g_v = cute.local_tile(
                    v_tma[None, None, i_kv * value_by_head, i_b * value_by_batch], (width, block_n), (0, None)
                )
                t_sq, t_gq = _partition(q_atom, s_q[None, None, 0], g_q)
                t_sk, t_gk = _partition(k_atom, s_k, g_k)
                t_sv, t_gv = _partition(v_atom, s_v, g_v)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(q_full, ROWS * width * 2)
                cute.copy(q_atom, t_gq, t_sq, tma_bar_ptr=q_full)
                k_slot, k_phase = Int32(0), Int32(1)
                v_slot, v_phase = Int32(0), Int32(1)
                for step in cutlass.range(steps, unroll=1):
                    _load(k_atom, t_gk[None, step], t_sk[None, k_slot], k_full + k_slot, k_empty + k_slot, k_phase,
                          block_n * width * 2)  # fmt: skip
                    _load(v_atom, t_gv[None, step], t_sv[None, v_slot], v_full + v_slot, v_empty + v_slot, v_phase,
                          block_n * width * 2)  # fmt: skip
                    k_slot, k_phase = _next(k_slot, k_phase, config.k_stages)
                    v_slot, v_phase = _next(v_slot, v_phase, config.v_stages)
        else:
            cute.arch.setmaxregister_increase(_CONSUMER_REGISTERS)
            lane = cute.arch.lane_idx()
            mine = thread - _LOADED_BY
            # Rows of a thread are row and row + 8: the accumulator of wgmma (PTX ISA, wgmma.mma_async, fragment D).
            row = row0 + (warp - 4) * 16 + lane // 4
            # Set here, once: what a loop changes on an object does not leave the loop.
            scores_mma.set(warpgroup.Field.ACCUMULATE, False)
            more_mma.set(warpgroup.Field.ACCUMULATE, True)
            values_mma.set(warpgroup.Field.ACCUMULATE, True)
            t_s, t_v = scores_mma.get_slice(mine), values_mma.get_slice(mine)
            a_q = scores_mma.make_fragment_A(t_s.partition_A(s_q))
            b_k = scores_mma.make_fragment_B(t_s.partition_B(s_k))
            b_v = values_mma.make_fragment_B(t_v.partition_B(s_v))
            scores = cute.make_rmem_tensor(t_s.partition_shape_C((ROWS, block_n)), Float32)
            acc = cute.make_rmem_tensor(t_v.partition_shape_C((ROWS, width)), Float32)
            weights = cute.make_rmem_tensor(t_v.partition_shape_A((ROWS, block_n)), out.element_type)
            reference, total, shrink = [cute.make_rmem_tensor(2, Float32) for _ in range(3)]
            acc.fill(0.0)
            total.fill(0.0)
            shrink.fill(1.0)
            reference.fill(-Float32.inf)

            k_slot, k_phase = Int32(0), Int32(0)
            v_slot, v_phase = Int32(0), Int32(0)
            cute.arch.mbarrier_wait(q_full, 0)
            cute.arch.mbarrier_wait(k_full, 0)
            _start_scores(scores_mma, more_mma, scores, a_q[None, None, None, 0], b_k[None, None, None, 0])
            warpgroup.wait_group(0)
            _release(k_empty, lane)
            k_slot, k_phase = _next(k_slot, k_phase, config.k_stages)
            self.softmax(scores, reference, total, shrink, row, Int32(0), end, row0, slope, lane)
            _take(scores, weights)
            for step in cutlass.range(1, steps, unroll=1):
                cute.arch.mbarrier_wait(k_full + k_slot, k_phase)
                _start_scores(scores_mma, more_mma, scores, a_q[None, None, None, 0], b_k[None, None, None, k_slot])
                cute.arch.mbarrier_wait(v_full + v_slot, v_phase)
                _start_values(values_mma, acc, weights, b_v[None, None, None, v_slot])
                warpgroup.wait_group(1)
                _release(k_empty + k_slot, lane)
                self.softmax(scores, reference, total, shrink, row, step * block_n, end, row0, slope, lane)
                warpgroup.wait_group(0)
                _release(v_empty + v_slot, lane)
                _scale(acc, shrink)
                _take(scores, weights)
                k_slot, k_phase = _next(k_slot, k_phase, config.k_stages)
                v_slot, v_phase = _next(v_slot, v_phase, config.v_stages)
            cute.arch.mbarrier_wait(v_full + v_slot, v_phase)
            _start_values(values_mma, acc, weights, b_v[None, None, None, v_slot])
            warpgroup.wait_group(0)
            self.store(acc, reference, total, out, lse, i_b, i_h, row, n_q, lane)

    @cute.jit
    def softmax(
        self, scores: cute.Tensor, reference: cute.Tensor, total: cute.Tensor, shrink: cute.Tensor, row: Int32,
        first: Int32, end: Int32, row0: Int32, slope: Float32, lane: Int32,
    ):  # fmt: skip
        """Scores of the keys from `first` on to exponentials; `shrink` is what earlier sums and products are worth."""
        config = self.config
        size = slope
        if slope < 0.0:
            size = -slope
            for i in cutlass.range_constexpr(config.block_n // 2):
                scores[i] = -scores[i]
        inner = end
        if const_expr(config.causal):
            inner = cutlass.min(end, row0 + 1)
        if first + config.block_n > inner:
            for i in cutlass.range_constexpr(config.block_n // 2):
                key = first + 8 * (i // 4) + 2 * (lane % 4) + i % 2
                last = end
                if const_expr(config.causal):
                    last = cutlass.min(end, row + 8 * (i // 2 % 2) + 1)
                scores[i] = scores[i] if key < last else -Float32.inf
        for r in cutlass.range_constexpr(2):
            peak = -Float32.inf
            for i in cutlass.range_constexpr(config.block_n // 4):
                peak = cute.arch.fmax(peak, scores[4 * (i // 2) + 2 * r + i % 2])
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=1))
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=2))
            peak = peak * size
            now = peak if peak > reference[r] + _SLACK else reference[r]
            pivot = now if now != -Float32.inf else Float32(0.0)
            shrink[r] = compat.exp2(reference[r] - pivot)
            reference[r] = now
            part = Float32(0.0)
            for i in cutlass.range_constexpr(config.block_n // 4):
                at = 4 * (i // 2) + 2 * r + i % 2
                scores[at] = compat.exp2(scores[at] * size - pivot)
                part += scores[at]
            total[r] = total[r] * shrink[r] + part

    @cute.jit
    def store(
        self, acc: cute.Tensor, reference: cute.Tensor, total: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
        i_b: Int32, i_h: Int32, row: Int32, n_q: Int32, lane: Int32,
    ):  # fmt: skip
        """Normalise and write the rows `row` and `row + 8`."""
        head_dim = self.config.head_dim
        for r in cutlass.range_constexpr(2):
            whole = total[r] + cute.arch.shuffle_sync_bfly(total[r], offset=1)
            whole = whole + cute.arch.shuffle_sync_bfly(whole, offset=2)
            at = row + 8 * r
            if at < n_q:
                factor = Float32(1.0) / whole if whole > 0.0 else Float32(0.0)
                target = out[i_b, i_h, at, None]
                pair = cute.make_rmem_tensor(2, out.element_type)
                pairs = cute.zipped_divide(target, (2,))
                for j in cutlass.range_constexpr(head_dim // 8):
                    for e in cutlass.range_constexpr(2):
                        pair[e] = (acc[4 * j + 2 * r + e] * factor).to(out.element_type)
                    cute.autovec_copy(pair, pairs[None, 4 * j + lane % 4])
                if lane % 4 == 0:
                    lse[i_b, i_h, at] = (reference[r] + compat.log2(whole)) * _LN2 if whole > 0.0 else -Float32.inf


def _rows_first(tensor):
    """[B, H, N, D] as [N, D, H, B]."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [2, 3, 1, 0]))


def _columns_first(tensor):
    """[B, H, N, D] as [D, N, H, B]."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [3, 2, 1, 0]))


def _partition(atom, shared, tiles):
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )


@cute.jit
def _load(atom, source, target, full, empty, phase: Int32, size: cutlass.Constexpr):
    """Wait for a free slot, then have TMA fill it."""
    cute.arch.mbarrier_wait(empty, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    cute.copy(atom, source, target, tma_bar_ptr=full)


@cute.jit
def _next(slot: Int32, phase: Int32, stages: cutlass.Constexpr):
    """The slot after, and the parity that its barrier is waited for with."""
    slot = slot + 1
    turned = slot == stages
    return Int32(0) if turned else slot, phase ^ 1 if turned else phase


@cute.jit
def _release(barrier, lane: Int32):
    if lane == 0:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def _start_scores(first, more, scores, q, k):
    warpgroup.fence()
    for i in cutlass.range_constexpr(cute.size(q, mode=[2])):
        cute.gemm(more if i else first, scores, q[None, None, i], k[None, None, i], scores)
    warpgroup.commit_group()


@cute.jit
def _start_values(mma, acc, weights, v):
    warpgroup.fence()
    for i in cutlass.range_constexpr(cute.size(weights, mode=[2])):
        cute.gemm(mma, acc, weights[None, None, i], v[None, None, i], acc)
    warpgroup.commit_group()


@cute.jit
def _take(scores, weights):
    """An accumulator's elements are the left operand's in the same order (fragments D and A of wgmma)."""
    for i in cutlass.range_constexpr(cute.size(scores)):
        weights[i] = scores[i].to(weights.element_type)


@cute.jit
def _scale(acc, shrink):
    if cute.arch.vote_any_sync(Boolean(shrink[0] != 1.0) | Boolean(shrink[1] != 1.0)):
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * shrink[i // 2 % 2]
