"""RowIntervals: each builder against rows written by hand, and attention through them against dense masks."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from oracle import BACKENDS, DEVICE, Served, across, compare
from torch import Tensor

from ffpa_hf import RowIntervals, ffpa_attn_func
from ffpa_hf import masks as masks_module
from ffpa_hf.masks import canonical_mask

LENGTHS = [(5, 5), (3, 8), (8, 3), (1, 7), (7, 1), (70, 130)]


def dense_by_hand(rows: int, keys: int, visible) -> Tensor:
    """bool `[rows, keys]` from a rule about one row and one key."""
    return torch.tensor([[bool(visible(row, key)) for key in range(keys)] for row in range(rows)]).reshape(rows, keys)


def assert_is(intervals: RowIntervals, expected: Tensor) -> None:
    assert intervals.start.dtype == intervals.end.dtype == torch.int32
    assert intervals.start.shape == intervals.end.shape == (1, expected.shape[0])
    assert torch.equal(intervals.dense(expected.shape[1])[0, 0], expected)


# --- builders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, keys", LENGTHS)
def test_full_shows_every_key(rows, keys):
    assert_is(RowIntervals.full(rows, keys), torch.ones(rows, keys, dtype=torch.bool))


@pytest.mark.parametrize("rows, keys", LENGTHS)
def test_causal_is_top_left(rows, keys):
    assert_is(RowIntervals.causal(rows, keys), dense_by_hand(rows, keys, lambda row, key: key <= row))


@pytest.mark.parametrize("rows, keys", LENGTHS)
def test_causal_lower_right_shows_the_last_row_everything(rows, keys):
    expected = dense_by_hand(rows, keys, lambda row, key: key <= row + keys - rows)
    assert_is(RowIntervals.causal_lower_right(rows, keys), expected)
    assert expected[-1].all()


@pytest.mark.parametrize("rows, keys", LENGTHS)
@pytest.mark.parametrize("window", [1, 3, 200])
@pytest.mark.parametrize("lower_right", [False, True])
def test_a_causal_window_shows_the_last_keys_up_to_the_row(rows, keys, window, lower_right):
    shift = keys - rows if lower_right else 0
    expected = dense_by_hand(rows, keys, lambda row, key: row + shift - window < key <= row + shift)
    assert_is(RowIntervals.sliding_window(rows, keys, window, lower_right=lower_right), expected)


@pytest.mark.parametrize("rows, keys", LENGTHS)
@pytest.mark.parametrize("window", [1, 3, 200])
@pytest.mark.parametrize("lower_right", [False, True])
def test_a_two_sided_window_shows_keys_closer_than_the_window(rows, keys, window, lower_right):
    shift = keys - rows if lower_right else 0
    expected = dense_by_hand(rows, keys, lambda row, key: abs(row + shift - key) < window)
    assert_is(RowIntervals.sliding_window(rows, keys, window, causal=False, lower_right=lower_right), expected)


@pytest.mark.parametrize("window", [0, -1, 2.5, None])
def test_a_window_of_nothing_raises(window):
    with pytest.raises(ValueError, match=f"window={window}"):
        RowIntervals.sliding_window(4, 4, window)


def packed_by_hand(q_lengths, k_lengths, rows, causal, window) -> Tensor:
    """Sequence by sequence: row i of a document of m rows and n keys stands on key i + n - m."""
    left, right = window
    keep = torch.zeros(rows, sum(k_lengths), dtype=torch.bool)
    q0 = k0 = 0
    for m, n in zip(q_lengths, k_lengths, strict=True):
        for row, key in itertools.product(range(m), range(n)):
            distance = key - (row + n - m)
            seen = (left < 0 or distance >= -left) and (right < 0 or distance <= right)
            keep[q0 + row, k0 + key] = seen and not (causal and distance > 0)
        q0, k0 = q0 + m, k0 + n
    return keep


PACKS = [
    ([3, 4], [3, 4]),
    ([2, 5, 1], [4, 3, 6]),
    ([0, 4, 0, 0, 3], [2, 4, 0, 3, 3]),  # empty sequences, repeated offsets
    ([3, 2], [0, 5]),  # rows without keys
    ([6], [6]),
]


@pytest.mark.parametrize("q_lengths, k_lengths", PACKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (1, -1), (2, 0), (-1, 1), (0, 0), (50, 50)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_documents_see_themselves_only(q_lengths, k_lengths, causal, window, dtype):
    cu_q = torch.tensor([0, *itertools.accumulate(q_lengths)], dtype=dtype)
    cu_k = torch.tensor([0, *itertools.accumulate(k_lengths)], dtype=dtype)
    rows = sum(q_lengths) + 2  # two rows of padding belong to nobody
    intervals = RowIntervals.packed(cu_q, cu_k, rows, causal=causal, window=window)
    assert_is(intervals, packed_by_hand(q_lengths, k_lengths, rows, causal, window))


def test_packing_nothing_shows_nothing():
    none = torch.zeros(1, dtype=torch.int32)
    assert not RowIntervals.packed(none, none, 3).dense(4).any()


def test_builders_read_no_value_on_the_host():
    RowIntervals.full(3, 4, "meta")
    for mask in (
        RowIntervals.causal(3, 4, "meta"),
        RowIntervals.causal_lower_right(3, 4, "meta"),
        RowIntervals.sliding_window(3, 4, 2, "meta"),
        RowIntervals.packed(torch.zeros(3, dtype=torch.int32, device="meta"), torch.zeros(3, device="meta"), 6),
    ):
        both = mask.intersect(RowIntervals.full(mask.q_len, 4, "meta"))
        assert both.dense(4).device.type == mask.rows(slice(1, 3)).start.device.type == "meta"
        assert [ranges.shape for ranges in both.query_ranges(4)] == [(1, 1), (1, 1)]


# --- views ------------------------------------------------------------------------------------------------------------


def random_intervals(batch: int, rows: int, keys: int, *, key_mask: bool = False, bias: bool = False) -> RowIntervals:
    """Any ranges at all: empty ones, inverted ones, and ones that reach outside the keys."""
    start = torch.randint(-3, keys + 2, (batch, rows), dtype=torch.int32)
    end = torch.randint(-3, keys + 4, (batch, rows), dtype=torch.int32)
    return RowIntervals(
        start,
        end,
        torch.rand(batch, keys) > 0.3 if key_mask else None,
        torch.randn(1, 2, rows, keys) if bias else None,
    )


def dense_of(intervals: RowIntervals, keys: int) -> Tensor:
    start, end = torch.broadcast_tensors(intervals.start, intervals.end)
    rows = []
    for low, high in zip(start.tolist(), end.tolist(), strict=True):
        rows.append(dense_by_hand(len(low), keys, lambda row, key, low=low, high=high: low[row] <= key < high[row]))
    keep = torch.stack(rows)[:, None]
    return keep if intervals.key_mask is None else keep & intervals.key_mask[:, None, None]


@pytest.mark.parametrize("key_mask", [False, True])
def test_dense_is_the_mask_the_intervals_stand_for(key_mask):
    intervals = random_intervals(3, 9, 13, key_mask=key_mask)
    assert torch.equal(intervals.dense(13), dense_of(intervals, 13))


def test_one_start_may_serve_many_ends():
    intervals = RowIntervals(torch.zeros(1, 4, dtype=torch.int32), torch.randint(0, 6, (3, 4), dtype=torch.int32))
    assert torch.equal(intervals.dense(6), dense_of(intervals, 6))


@pytest.mark.parametrize("index", [slice(2, 7), slice(0, 1), slice(-3, None), slice(4, 4), slice(None, None, 2)])
def test_rows_are_the_mask_of_those_rows(index):
    intervals = random_intervals(2, 9, 13, key_mask=True, bias=True)
    part = intervals.rows(index)
    assert torch.equal(part.dense(13), intervals.dense(13)[:, :, index])
    assert torch.equal(part.bias, intervals.bias[:, :, index])
    assert torch.equal(part.key_mask, intervals.key_mask)


def test_rows_keep_a_bias_that_is_one_for_all_rows():
    start = torch.zeros(1, 4, dtype=torch.int32)
    for shape in [(1, 2, 1, 5), (5,)]:
        bias = torch.randn(shape)
        assert torch.equal(RowIntervals(start, start + 5, None, bias).rows(slice(1, 3)).bias, bias)


def test_rows_do_not_remember_the_ranges_of_all_rows():
    intervals = RowIntervals.causal(200, 200)
    whole = intervals.query_ranges(200)
    part = intervals.rows(slice(100, 200))
    assert_ranges(part, 200)
    assert not torch.equal(part.query_ranges(200)[0], whole[0])


@pytest.mark.parametrize(
    "first, second", list(itertools.product([(1, False), (3, True)], [(1, True), (3, False), (3, True)]))
)
def test_intersect_shows_what_both_show(first, second):
    one, two = (random_intervals(batch, 9, 13, key_mask=mask) for batch, mask in (first, second))
    assert torch.equal(one.intersect(two).dense(13), one.dense(13) & two.dense(13))


def test_intersect_adds_biases_and_keeps_one():
    one, two = random_intervals(1, 4, 6, bias=True), random_intervals(1, 4, 6, bias=True)
    assert torch.equal(one.intersect(two).bias, one.bias + two.bias)
    plain = RowIntervals.full(4, 6)
    assert torch.equal(one.intersect(plain).bias, one.bias)
    assert torch.equal(plain.intersect(one).bias, one.bias)


def test_to_moves_every_part():
    intervals = random_intervals(2, 4, 6, key_mask=True, bias=True)
    intervals.query_ranges(6)
    moved = intervals.to("meta")
    assert moved.device.type == "meta"
    assert {part.device.type for part in (moved.start, moved.end, moved.key_mask, moved.bias)} == {"meta"}
    assert moved.query_ranges(6)[0].device.type == "meta"  # not the ones remembered for the other device


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_intervals_survive_copies(duplicate):
    intervals = random_intervals(2, 4, 6, key_mask=True, bias=True)
    other = duplicate(intervals)
    assert torch.equal(other.dense(6), intervals.dense(6)) and torch.equal(other.bias, intervals.bias)


def test_intervals_are_frozen():
    with pytest.raises(AttributeError):
        RowIntervals.full(3, 4).start = torch.zeros(1, 3, dtype=torch.int32)


# --- query ranges -----------------------------------------------------------------------------------------------------


def assert_ranges(intervals: RowIntervals, keys: int) -> None:
    """Each 64-key block: the first and last row that sees a key of it, by looking at every one."""
    bare = RowIntervals(*torch.broadcast_tensors(intervals.start, intervals.end))
    keep = dense_of(bare, keys)[:, 0]
    first, last = intervals.query_ranges(keys)
    blocks = -(-keys // 64)
    assert first.dtype == last.dtype == torch.int32
    assert first.shape == last.shape == (keep.shape[0], blocks)
    for item, block in itertools.product(range(keep.shape[0]), range(blocks)):
        rows = keep[item, :, 64 * block : 64 * (block + 1)].any(-1).nonzero().flatten()
        low, high = first[item, block].item(), last[item, block].item()
        if len(rows) == 0:
            assert low >= high, f"block {block} is seen by nobody, not by [{low}, {high})"
        else:
            assert (low, high) == (rows[0].item(), rows[-1].item() + 1), f"block {block}"


@pytest.mark.parametrize("keys", [1, 64, 65, 200])
@pytest.mark.parametrize("batch", [1, 3])
def test_query_ranges_are_the_rows_that_see_a_block(keys, batch):
    for _ in range(5):
        assert_ranges(random_intervals(batch, 20, keys), keys)


@pytest.mark.parametrize(
    "intervals",
    [
        RowIntervals.causal(70, 200),
        RowIntervals.causal(200, 70),
        RowIntervals.causal_lower_right(200, 70),
        RowIntervals.sliding_window(150, 150, 9),
        RowIntervals.full(3, 130),
    ],
    ids=["wide", "tall", "lower right", "window", "full"],
)
def test_query_ranges_of_common_masks(intervals):
    for keys in (70, 130, 200):
        assert_ranges(intervals, keys)


def test_query_ranges_computed_in_pieces_are_the_same(monkeypatch):
    intervals = random_intervals(2, 50, 200)
    monkeypatch.setattr(masks_module, "_RANGE_SCRATCH_ELEMENTS", 2 * 4 * 7)
    assert_ranges(intervals, 200)


def test_query_ranges_of_nothing_are_empty():
    for intervals, keys in ((RowIntervals.full(0, 70), 70), (RowIntervals.full(5, 0), 0)):
        first, last = intervals.query_ranges(keys)
        assert first.shape == last.shape == (1, -(-keys // 64)) and not (last > first).any()


def test_query_ranges_are_computed_once_per_length():
    intervals = RowIntervals.causal(10, 10)
    assert intervals.query_ranges(10)[0] is intervals.query_ranges(10)[0]
    assert intervals.query_ranges(100)[0].shape == (1, 2)


# --- attention through them -------------------------------------------------------------------------------------------


def kinds(rows: int, keys: int) -> dict[str, RowIntervals]:
    """One of each: what Hugging Face builds out of intervals."""
    present = torch.ones(2, keys, dtype=torch.bool)
    present[0, : keys // 3] = False
    present[1, keys // 2] = False
    causal = RowIntervals.causal(rows, keys)
    prefix = torch.maximum(causal.end, torch.tensor(keys // 3, dtype=torch.int32)).clamp(max=keys)
    chunk = torch.arange(rows, dtype=torch.int32)[None] // 4 * 4
    cu = torch.tensor([0, keys // 4, keys // 4, keys])
    lengths = torch.tensor([0, rows // 2, rows // 2, rows])
    return {
        "random": random_intervals(2, rows, keys),
        "padding": RowIntervals(causal.start, causal.start + keys, present),
        "causal and padding": RowIntervals(causal.start, causal.end, present),
        "window": RowIntervals.sliding_window(rows, keys, 3),
        "prefix": RowIntervals(causal.start, prefix),
        "chunks": RowIntervals(chunk.clamp(max=keys), (chunk + 4).clamp(max=keys)),
        "packed": RowIntervals.packed(lengths, cu, rows, causal=True),
        "chunked prefill": RowIntervals.causal_lower_right(rows, keys),
        "static cache": RowIntervals(causal.start, (causal.start + keys // 2)),
        "outside": RowIntervals(causal.start - 5, causal.start + keys + 7),
    }


@across("kind", list(kinds(12, 12)), quick=(0, 2, 6))
def test_intervals_attend_like_the_dense_mask(backend: Served, kind):
    for rows, keys in ((12, 12), (10, 70))[: 1 if backend.is_kernel else 2]:
        mask = kinds(rows, keys)[kind].to(DEVICE)
        tensors = backend.qkv(2, 2, rows, keys)
        compare(
            lambda mask=mask, **t: backend(**t, attn_mask=mask, return_lse=True), tensors, {"keep": mask.dense(keys)}
        )
        if not backend.is_kernel:
            compare(lambda mask=mask, **t: backend(**t, attn_mask=mask), tensors, {"keep": mask.dense(keys)})


@across("rows, keys", [(80, 150), (150, 80)], quick=(0,))
def test_intervals_over_many_blocks_attend_like_the_dense_mask(backend: Served, rows, keys):
    mask = RowIntervals.sliding_window(rows, keys, 20, DEVICE)
    expected = {"keep": mask.dense(keys)}
    compare(lambda **t: backend(**t, attn_mask=mask, enable_gqa=True), backend.qkv(1, 2, rows, keys, 64, 1), expected)


@across("shape", [(2, 2, 9, 9), (1, 2, 9, 9), (2, 1, 1, 9), (9, 9), (9,)], quick=(1, 2))
def test_the_bias_of_intervals_adds_and_has_a_gradient(backend: Served, shape):
    mask = RowIntervals.causal(9, 9, DEVICE)
    present = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    present[1, 4:] = False
    tensors = backend.qkv(rows=9, keys=9) | {"bias": backend.randn(*shape)}
    keep = mask.dense(9) & present[:, None, None]
    gradients = compare(
        lambda bias, **t: backend(**t, attn_mask=RowIntervals(mask.start, mask.end, present, bias)),
        tensors,
        {"keep": keep},
    )
    assert gradients["bias"].shape == shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_intervals_with_everything_at_once(backend: Served):
    mask = RowIntervals.sliding_window(9, 9, 4, DEVICE)
    tensors = backend.qkv(2, 4, 9, 9, kv_heads=2) | {"bias": backend.randn(1, 4, 9, 9), "sinks": backend.randn(4)}
    compare(
        lambda bias, **t: backend(
            **t,
            attn_mask=RowIntervals(mask.start, mask.end, None, bias),
            softcap=2.0,
            return_lse=True,
            enable_gqa=True,
            scale=0.3,
        ),
        tensors,
        {"keep": mask.dense(9), "softcap": 2.0, "scale": 0.3},
    )


# --- bad input --------------------------------------------------------------------------------------------------------

INT = torch.zeros(1, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ((INT.long(), INT), TypeError, "start must be an int32 tensor"),
        ((INT, INT.float()), TypeError, "end must be an int32 tensor"),
        ((0, INT), TypeError, "start must be an int32 tensor .*not int"),
        ((INT[0], INT), ValueError, "start must have shape"),
        ((INT, INT[:, :3]), ValueError, "differ in rows"),
        ((INT.expand(2, 4), INT.expand(3, 4)), ValueError, "differ in rows"),
        ((INT, INT, torch.zeros(1, 4)), TypeError, "key_mask must be bool"),
        ((INT, INT, torch.zeros(4, dtype=torch.bool)), ValueError, "key_mask must have shape"),
        ((INT, INT, [[True] * 4]), TypeError, "key_mask must be bool .*not list"),
        ((INT, INT, None, torch.zeros(4, 4, dtype=torch.bool)), TypeError, "bias must be floating"),
        ((INT, INT, None, 0.5), TypeError, "bias must be floating point, not float"),
        ((INT, INT.to("meta")), ValueError, "end is on meta"),
    ],
)
def test_wrong_parts_raise_where_the_mask_is_made(arguments, error, text):
    with pytest.raises(error, match=text):
        RowIntervals(*arguments)


@pytest.mark.parametrize(
    "offsets, error, text",
    [
        (([0, 4], INT[0]), TypeError, "cu_seqlens_q must be a one-dimensional integer tensor, not list"),
        ((INT[0], INT), TypeError, r"cu_seqlens_k must be .*not \(1, 4\)"),
        ((INT[0], INT[0, :2]), ValueError, "4 entries and cu_seqlens_k 2"),
    ],
)
def test_offsets_that_make_no_pack_raise(offsets, error, text):
    with pytest.raises(error, match=text):
        RowIntervals.packed(*offsets, 4)


@pytest.mark.parametrize(
    "mask, text",
    [
        (RowIntervals.full(5, 4), "describes 5 query rows; query has 4"),
        (RowIntervals(INT.expand(3, 4), INT), "start has batch 3"),
        (RowIntervals(INT, INT, torch.ones(1, 5, dtype=torch.bool)), "key_mask has 5 keys; the call has 4"),
        (RowIntervals(INT, INT, torch.ones(3, 4, dtype=torch.bool)), "key_mask has batch 3"),
        (RowIntervals(INT, INT, None, torch.zeros(4, 5)), "bias has shape"),
    ],
)
def test_intervals_that_do_not_fit_the_call_raise(mask, text):
    query = torch.randn(2, 1, 4, 64)
    with pytest.raises(ValueError, match=text):
        ffpa_attn_func(query, query, query, mask)


def test_a_bias_of_intervals_in_another_half_raises():
    query = torch.randn(2, 1, 4, 64)
    with pytest.raises(TypeError, match="torch.float16 beside torch.float32"):
        ffpa_attn_func(query, query, query, RowIntervals(INT, INT, None, torch.zeros(4, 4, dtype=torch.float16)))


# --- canonical form ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), (2, 3, 4, 6), (6,), (1, 1, 1, 1)])
def test_a_dense_mask_becomes_a_view_of_four_dimensions(shape):
    mask = torch.ones(shape, dtype=torch.bool)
    made = canonical_mask(mask, False, batch=2, heads=3, q_len=4, kv_len=6, device=mask.device)
    assert made.kind == "bool" and made.mask.dim() == 4 and made.bias is None
    assert made.mask.data_ptr() == mask.data_ptr()  # never expanded or copied


def test_intervals_stay_intervals_and_hand_over_their_bias():
    bias = torch.zeros(4, 6)
    mask = RowIntervals(INT, INT, None, bias)
    made = canonical_mask(mask, False, batch=2, heads=3, q_len=4, kv_len=6, device=bias.device)
    assert made.kind == "intervals" and made.intervals is mask and made.mask is None
    assert made.bias.data_ptr() == bias.data_ptr() and made.bias.dim() == 4


def test_query_ranges_follow_a_mask_that_is_refilled():
    mask = RowIntervals.causal(200, 200)
    assert mask.query_ranges(200)[0].tolist() == [[0, 64, 128, 192]]
    mask.end.fill_(200)
    assert mask.query_ranges(200)[0].tolist() == [[0, 0, 0, 0]]
    assert mask.query_ranges(200)[0] is mask.query_ranges(200)[0]


def test_query_ranges_of_inference_tensors():
    with torch.inference_mode():
        mask = RowIntervals.causal(70, 70)
        assert mask.query_ranges(70)[1].tolist() == [[70, 70]]


@pytest.mark.parametrize("builder", ["full", "causal", "causal_lower_right"])
@pytest.mark.parametrize("lengths, named", [((-1, 3), "q_len=-1"), ((3, -2), "kv_len=-2"), ((2.5, 3), "q_len=2.5")])
def test_lengths_of_builders_are_whole_numbers_from_zero_on(builder, lengths, named):
    with pytest.raises(ValueError, match=f"RowIntervals.{builder}: {named} is not allowed"):
        getattr(RowIntervals, builder)(*lengths)
    with pytest.raises(ValueError, match="sliding_window: "):
        RowIntervals.sliding_window(*lengths, 4)


def test_packed_rows_are_a_whole_number_from_zero_on():
    offsets = torch.tensor([0, 2])
    with pytest.raises(ValueError, match="RowIntervals.packed: q_len=-2 is not allowed"):
        RowIntervals.packed(offsets, offsets, -2)


@pytest.mark.parametrize("window", [3, (1,), (1.5, 1), (True, 1), None])
def test_a_window_is_two_whole_numbers(window):
    offsets = torch.tensor([0, 2])
    with pytest.raises(ValueError, match="RowIntervals.packed: window=.* is not allowed; use .left, right."):
        RowIntervals.packed(offsets, offsets, 2, window=window)
