"""Tiles, column splits, scratch plans and rounds of the Triton kernels: plain numbers, the same on every machine."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from ffpa_hf.backends import TritonBackend
from ffpa_hf.call import AttentionCall
from ffpa_hf.kernels import triton
from ffpa_hf.kernels.common import Accepted
from ffpa_hf.kernels.triton import configs

HEAD_DIMS = range(64, 1025, 8)
KB = 1024


@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 192, 256, 320, 384, 448, 512, 520, 576, 640, 896, 1000, 1024])
@pytest.mark.parametrize("width", [64, 128, 256, 320, 512])
def test_columns_cover_the_head_dim_with_powers_of_two(head_dim, width):
    columns = configs.split_columns(head_dim, width)
    assert columns.slices * columns.width >= head_dim
    assert (columns.slices - 1) * columns.width < head_dim, "a slice with nothing in it"
    for part in (columns.first, columns.second):
        assert part & (part - 1) == 0
    assert columns.first >= 16 and (columns.second == 0 or columns.second >= 16)


def test_head_dims_between_powers_of_two_are_not_padded_to_the_next():
    assert configs.split_columns(320, 512) == configs.Columns(256, 64, 1)
    assert configs.split_columns(384, 512) == configs.Columns(256, 128, 1)
    assert configs.split_columns(640, 512) == configs.Columns(256, 64, 2)
    assert configs.split_columns(512, 512) == configs.Columns(512, 0, 1)
    wasted = [configs.split_columns(d, 320).width * configs.split_columns(d, 320).slices / d for d in HEAD_DIMS]
    assert max(wasted) < 1.6 and sum(wasted) / len(wasted) < 1.2


@pytest.mark.parametrize("smem_limit", configs.SMEM_LIMITS)
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_every_head_dim_has_a_legal_tile_on_every_device(smem_limit, tma, busy):
    for head_dim, q_len, itemsize in itertools.product(HEAD_DIMS, (1, 4096), (2, 4)):
        chosen = configs.choose_forward(head_dim, q_len, smem_limit, itemsize, tma, busy)
        assert configs.is_legal(chosen, head_dim, smem_limit, itemsize, tma)
    for head_dim in HEAD_DIMS:
        chosen = configs.choose_backward(head_dim, smem_limit, 2, tma, busy)
        assert configs.is_legal(chosen, head_dim, smem_limit, 2, tma)


def test_the_backward_scheme_goes_by_head_dim_and_features():
    def scheme(head_dim, busy=False):
        return type(configs.choose_backward(head_dim, 227 * KB, 2, True, busy))

    assert scheme(64) is scheme(128) is configs.FusedBackwardConfig
    assert scheme(192) is scheme(256) is scheme(512) is configs.BackwardConfig
    assert scheme(64, busy=True) is configs.BackwardConfig, "the fused kernels know ranges only"


def test_one_loop_over_the_keys_is_for_intervals_and_wide_heads_on_hopper():
    def phased(head_dim, intervals, q_len=8192, tma=True, smem_limit=227 * KB, busy=False):
        return configs.choose_forward(head_dim, q_len, smem_limit, 2, tma, busy, intervals).phased

    assert not phased(256, True) and not phased(192, True)
    assert phased(256, False) and phased(128, True) and phased(512, True)
    assert phased(256, True, tma=False, smem_limit=99 * KB)
    assert phased(256, True, busy=True) and phased(256, True, q_len=16), "measured plain and long"


def test_a_tile_that_does_not_fit_is_not_legal():
    large = configs.ForwardConfig(128, 128, 0, 512, 8, 2)
    assert not configs.is_legal(large, 512, 227 * KB, 2, True)
    assert configs.is_legal(large, 128, 227 * KB, 2, True)
    assert not configs.is_legal(large, 128, 99 * KB, 2, False)
    unequal = configs.WideConfig(configs.ScoresConfig(128, 128, 64, 4, 3), configs.ProductConfig(64, 256, 64, 8, 4))
    assert not configs.is_legal(unequal, 512, 227 * KB, 2, True), "the product must take the blocks that were written"


def test_targets_of_compute_capabilities():
    assert configs.target_for((8, 0)) == (163 * KB, False, False)
    assert configs.target_for((8, 6)) == configs.target_for((8, 9)) == (99 * KB, False, False)
    assert configs.target_for((9, 0)) == (227 * KB, True, False)
    assert configs.target_for((10, 0)) == (227 * KB, True, True)
    assert configs.target_for((12, 0)) == (99 * KB, True, False)
    assert configs.target_for((9, 4), is_rocm=True) == (64 * KB, False, False)


# --- the backward's scratch -------------------------------------------------------------------------------------------


def _plan(batch, q_heads, kv_heads, q_len, kv_len, head_dim, limit_mb, matrices=2):
    return configs.plan_backward(
        batch, q_heads, kv_heads, q_len, kv_len, head_dim,
        itemsize=2, matrices=matrices, partials=2, row_tile=128, key_tile=128, limit=limit_mb * 2**20,
    )  # fmt: skip


SHAPES = [
    (1, 32, 32, 8192, 8192, 512),
    (1, 32, 4, 8192, 8192, 512),
    (2, 16, 1, 4096, 5000, 256),
    (1, 1, 1, 65536, 65536, 512),
    (65536, 1, 1, 4, 4, 64),
    (1, 8, 8, 1, 300000, 1024),
]


@pytest.mark.parametrize("limit_mb", [64, 300, 1024, 8192])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_of_every_head_is_worked_off_once_within_the_limit(shape, limit_mb):
    plan = _plan(*shape, limit_mb)
    batch, q_heads, kv_heads, q_len, *_ = shape
    rows = {}
    for lane0, lanes, row0, row1, _, _ in plan.rounds:
        assert lanes <= plan.lanes and row1 - row0 <= plan.rows
        for lane in range(lane0, lane0 + lanes):
            rows.setdefault(lane, []).append((row0, row1))
    assert sorted(rows) == list(range(batch * q_heads))
    for spans in rows.values():
        assert spans[0][0] == 0 and spans[-1][1] == q_len
        assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    least = 128 * plan.cols * 2 * 2 + plan.partial_bytes
    assert plan.scratch_bytes <= max(limit_mb * 2**20, least)


@pytest.mark.parametrize("limit_mb", [64, 300, 1024])
@pytest.mark.parametrize("shape", SHAPES)
def test_bands_of_a_group_begin_and_end_its_sums_once(shape, limit_mb):
    plan = _plan(*shape, limit_mb)
    group = shape[1] // shape[2]
    opened = {}
    for lane0, lanes, _, _, first, last in plan.rounds:
        assert lanes % plan.heads == 0 and lane0 % plan.heads == 0
        for unit in {lane // group for lane in range(lane0, lane0 + lanes)}:
            if first:
                assert unit not in opened
                opened[unit] = True
            assert opened[unit], "a band after the last of its group"
            if last:
                opened[unit] = False
        assert plan.banded or (first and last)
    assert not any(opened.values())


def test_scratch_does_not_grow_with_the_square_of_the_length():
    for q_len in (8192, 65536, 262144):
        assert _plan(1, 1, 1, q_len, q_len, 64, 1024).scratch_bytes <= 2**30


def test_one_gradient_needs_half_of_the_scratch():
    assert _plan(*SHAPES[0], 1024, matrices=1).lanes == 2 * _plan(*SHAPES[0], 1024).lanes


# --- the wide forward's rounds ----------------------------------------------------------------------------------------


def test_the_wide_forward_is_for_wide_heads_with_enough_blocks():
    def chosen(head_dim, lanes, q_len, kv_len, workspace_mb=1024, smem_limit=227 * KB, tma=True):
        return configs.choose_wide(head_dim, lanes, q_len, kv_len, workspace_mb, smem_limit, 2, tma)

    assert chosen(512, 32, 8192, 8192) is not None
    assert chosen(1024, 16, 4096, 4096) is not None
    assert chosen(256, 32, 8192, 8192) is None, "the fused kernel is faster there"
    assert chosen(512, 32, 1, 8192) is None, "decoding has one row"
    assert chosen(512, 1, 1024, 8192) is None, "eight blocks leave a GPU idle"
    assert chosen(512, 32, 8192, 8192, workspace_mb=64) is None, "so does a small scratch"
    assert chosen(512, 32, 8192, 8192, smem_limit=163 * KB, tma=False) is None


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("lanes", "q_len", "kv_len"), [(32, 8192, 8192), (1, 32768, 32768), (256, 1000, 1030), (3, 40000, 9000)]
)
def test_rounds_of_the_wide_forward_take_every_block_once(lanes, q_len, kv_len, is_causal):
    _, config = configs._WIDE_TMA[-1]
    rounds = configs.wide_rounds(config, lanes, q_len, kv_len, is_causal, 2, 1024, 132)
    tiles = -(-q_len // config.scores.block_m)
    seen = [
        (lane, tile)
        for part in rounds
        for lane in range(part.lane0, part.lane0 + part.lanes)
        for tile in range(part.tile0, part.tile0 + part.tiles)
    ]
    assert sorted(seen) == list(itertools.product(range(lanes), range(tiles)))
    bytes_per_block = config.scores.block_m * -(-kv_len // 128) * 128 * 2
    assert max(part.blocks for part in rounds) * bytes_per_block <= 2**30


# --- what the backend says of itself ----------------------------------------------------------------------------------


def _call(**fields):
    defaults = {
        "batch": 1, "q_heads": 32, "kv_heads": 32, "q_len": 8192, "kv_len": 8192, "head_dim": 512, "value_dim": 512,
        "dtype": torch.bfloat16, "device_type": "cuda", "capability": (9, 0),
    }  # fmt: skip
    return AttentionCall(**(defaults | fields))


def test_supports_every_mask_dropout_softcap_and_sinks():
    pytest.importorskip("triton")
    for kind in ("none", "bool", "additive", "intervals"):
        call = _call(mask_kind=kind, dropout_p=0.1, softcap=5.0, has_sinks=True, has_bias=True, bias_needs_grad=True)
        assert isinstance(triton.supports(call, backward=True), Accepted)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"dtype": torch.float32}, "dtype"),
        ({"head_dim": 32, "value_dim": 32}, "head dim"),
        ({"head_dim": 1032, "value_dim": 1032}, "head dim"),
        ({"head_dim": 68, "value_dim": 68}, "head dim"),
        ({"value_dim": 256}, "value width"),
        ({"capability": (7, 5)}, "target"),
        ({"device_type": "mps", "capability": None}, "device"),
    ],
)
def test_refuses_with_the_rule_that_applies(fields, rule):
    answer = triton.supports(_call(**fields))
    assert not answer.accepted and answer.rule == rule


def test_a_triton_that_cannot_be_imported_is_a_reason(monkeypatch):
    monkeypatch.setattr(triton, "_import_problem", lambda: "OSError: broken")
    answer = triton.supports(_call())
    assert not answer.accepted and "OSError: broken" in answer.reason


def test_describe_names_kernels_tiles_and_scratch():
    text = triton.describe(_call(needs_grad=True), TritonBackend(workspace_mb=512))
    assert "forward_scores" in text and "512 MiB" in text and "round" in text
    assert "attention_forward" in triton.describe(_call(head_dim=128, value_dim=128), TritonBackend())
    small = triton.describe(_call(capability=(8, 9)), TritonBackend())
    assert "attention_forward" in small and "pointers" in small
    for head_dim, capability in itertools.product((64, 72, 1024), ((8, 0), (9, 0), (12, 0))):
        assert triton.describe(_call(head_dim=head_dim, value_dim=head_dim, capability=capability, needs_grad=True))


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smem_limit", configs.SMEM_LIMITS)
def test_decoding_has_a_legal_tile_that_holds_the_rows(smem_limit):
    for head_dim, q_len, group, itemsize in itertools.product(HEAD_DIMS, range(1, 8), (1, 8, 32), (2, 4)):
        chosen = configs.choose_decode(head_dim, q_len, group, smem_limit, itemsize)
        if chosen is None:  # the ordinary forward serves what fits nowhere
            assert 50 * configs.split_columns(head_dim, head_dim).width * itemsize > smem_limit
            continue
        assert configs.is_legal(chosen, head_dim, smem_limit, itemsize, False)
        tiles = configs.decode_row_tiles(chosen, q_len * group)
        assert tiles * chosen.block_m >= q_len * group
        assert configs.for_rows(chosen, head_dim, q_len * group, smem_limit, itemsize) == chosen


def test_decoding_begins_below_eight_rows():
    assert configs.choose_decode(512, 0, 1, 227 * KB) is None
    assert configs.choose_decode(512, 8, 1, 227 * KB) is None
    assert configs.choose_decode(512, 7, 8, 227 * KB).block_m == 32
    assert configs.choose_decode(128, 7, 8, 227 * KB).block_m == 64


def test_a_tuned_decode_tile_keeps_its_rows_where_more_do_not_fit():
    tight = configs.DecodeConfig(16, 64, 4, 4, 2)
    assert configs.is_legal(tight, 128, 227 * KB, 2, False)
    assert configs.for_rows(tight, 128, 56, 227 * KB, 2) == tight
    assert configs.for_rows(configs.DecodeConfig(16, 32, 4, 3, 2), 128, 56, 227 * KB, 2).block_m == 64


@pytest.mark.parametrize("field", ["block_m", "block_n", "num_warps", "num_stages", "per_processor"])
def test_a_decode_tile_of_nothing_is_not_legal(field):
    config = replace(configs.DecodeConfig(16, 64, 4, 3, 2), **{field: 0})
    assert not configs.is_legal(config, 128, 227 * KB, 2, False)


def test_few_heads_fill_the_gpu_and_many_are_not_divided():
    config = configs.DecodeConfig(16, 32, 4, 3, 1)

    def splits(tiles, kv_len):
        return configs.decode_splits(config, tiles, -(-kv_len // 32), 132)

    assert splits(4, 8192) * 4 >= 0.9 * 132
    assert splits(1, 10**6) >= 132
    assert splits(132 * 8, 8192) == 1
    assert splits(1, 1) == splits(1, 0) == splits(0, 8192) == 1
    for tiles in (70, 100, 150):  # neither one nor two programs for each place: no half of the GPU stays idle
        number = splits(tiles, 8192)
        rounds = -(-tiles * number // 132)
        assert tiles * number >= 0.75 * rounds * 132
    assert all(1 <= splits(tiles, kv_len) <= -(-kv_len // 32) for tiles in (1, 3, 64) for kv_len in (1, 33, 500, 5000))


def test_describe_says_into_how_many_parts_the_keys_are_split(monkeypatch):
    monkeypatch.setattr(triton, "_processors", lambda device_type: 132)
    text = triton.describe(_call(q_len=1, kv_heads=4), TritonBackend())
    config = configs.choose_decode(512, 1, 8, 227 * KB)
    number = configs.decode_splits(config, 4, -(-8192 // config.block_n), 132)
    assert f"split-KV decode, {number} splits" in text and "decode_combine" in text and "8 query rows" in text
    one = triton.describe(_call(q_len=2, batch=512), TritonBackend())
    assert "1 split," in one and "decode_combine" not in one
    assert "Backward" in triton.describe(_call(q_len=2, needs_grad=True), TritonBackend())
