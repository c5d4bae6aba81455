"""Packed sequences: the same as running each sequence alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import BACKENDS, DEVICE, HAS_GPU, Served, across, assert_close, assert_gradient_close, truth
from torch.utils._python_dispatch import TorchDispatchMode

from ffpa_hf import RowIntervals, ffpa_attn_func, ffpa_attn_varlen_func

#: (query lengths, key lengths)
PACKS = {
    "self": ([5, 9, 3], [5, 9, 3]),
    "cross": ([2, 7], [6, 3]),
    "empty sequences": ([0, 4, 0, 0, 3], [2, 4, 0, 3, 3]),
    "rows without keys": ([3, 2], [0, 5]),
    "one": ([11], [11]),
    "all empty": ([0, 0], [0, 0]),
}


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=DEVICE)


def one_by_one(q, k, v, q_lengths, k_lengths, *, causal=False, window=(-1, -1), scale=None):
    """Each sequence alone, in float64; bottom-right aligned as flash_attn has it."""
    outs, lses = [], []
    for query, key, value in zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True):
        rows, keys = query.shape[0], key.shape[0]
        distance = torch.arange(keys, device=q.device) - torch.arange(rows, device=q.device)[:, None] - (keys - rows)
        keep = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
        if causal:
            keep &= distance <= 0
        if window[0] >= 0:
            keep &= distance >= -window[0]
        if window[1] >= 0:
            keep &= distance <= window[1]
        parts = (part.transpose(0, 1)[None] for part in (query, key, value))
        out, lse = truth(*parts, keep=keep, scale=scale)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def check(backend: Served, pack: str, heads: tuple[int, int] = (2, 2), *, return_lse: bool = True, **options) -> None:
    q_lengths, k_lengths = PACKS[pack]
    tensors = [
        backend.randn(sum(lengths), count, 64).requires_grad_()
        for lengths, count in ((q_lengths, heads[0]), (k_lengths, heads[1]), (k_lengths, heads[1]))
    ]
    check_pack(backend, q_lengths, k_lengths, tensors, return_lse=return_lse, **options)


def check_pack(
    backend: Served, q_lengths: list[int], k_lengths: list[int], tensors: list[torch.Tensor], *,
    return_lse: bool, offsets_dtype: torch.dtype = torch.int32, **options,
) -> None:  # fmt: skip
    """Output, log-sum-exp and gradients of the leaves (query, key, value) are those of each sequence alone."""
    heads = tensors[0].shape[1], tensors[1].shape[1]
    with backend.forced():
        result = ffpa_attn_varlen_func(
            *tensors,
            offsets(q_lengths, offsets_dtype),
            offsets(k_lengths, offsets_dtype),
            max(q_lengths, default=0),
            max(k_lengths, default=0),
            causal=options.get("causal", False),
            window_size=options.get("window", (-1, -1)),
            softmax_scale=options.get("scale"),
            return_lse=return_lse,
            backend=backend.name,
        )
    out, lse = result if return_lse else (result, None)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected, expected_lse = one_by_one(*exact, q_lengths, k_lengths, **options)
    assert out.dtype == backend.dtype and out.shape == expected.shape
    assert_close(out, expected, backend.dtype, "out")
    outputs, wanted, seeds = [out], [expected], [torch.randn_like(expected)]
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == (heads[0], sum(q_lengths))
        assert_close(lse, expected_lse, backend.dtype, "lse")
        outputs, wanted, seeds = [out, lse], [expected, expected_lse], [*seeds, torch.randn_like(expected_lse)]
    if not sum(q_lengths):
        return
    seeds = [seed.to(output.dtype) for seed, output in zip(seeds, outputs, strict=True)]
    found = torch.autograd.grad(outputs, tensors, seeds)
    gradients = torch.autograd.grad(wanted, exact, [seed.double() for seed in seeds])
    for name, gradient, exact_gradient in zip("qkv", found, gradients, strict=True):
        assert_gradient_close(gradient, exact_gradient, backend.dtype, f"gradient of {name}")


@across("pack", list(PACKS), quick=(1, 2))
def test_a_pack_gives_each_sequence_alone(backend: Served, pack):
    check(backend, pack)
    if not backend.is_kernel:
        check(backend, pack, return_lse=False)


@across("pack", list(PACKS), quick=(0, 2))
def test_causal_is_bottom_right_in_each_sequence(backend: Served, pack):
    check(backend, pack, causal=True)


@across("window", [(2, 0), (1, 1), (-1, 1), (3, -1), (0, 0)], quick=(0,))
def test_windows_stay_inside_each_sequence(backend: Served, window):
    check(backend, "self", window=window)
    if not backend.is_kernel:
        check(backend, "cross", window=window, causal=True)


@across("heads", [(4, 2), (4, 1)])
def test_heads_share_keys_without_being_told(backend: Served, heads):
    check(backend, "cross", heads, causal=True, scale=0.3)


def pack_arguments(q_heads: int = 2, kv_heads: int = 2, **changes):
    q, k = torch.randn(8, q_heads, 64, device=DEVICE), torch.randn(8, kv_heads, 64, device=DEVICE)
    cu = offsets([3, 5])
    return {
        "q": q, "k": k, "v": k, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 5, "max_seqlen_k": 5
    } | changes  # fmt: skip


def test_nothing_leaks_between_documents():
    arguments = pack_arguments()
    before = ffpa_attn_varlen_func(**arguments, causal=True)
    changed = arguments["k"].clone()
    changed[:3] += 100
    after = ffpa_attn_varlen_func(**(arguments | {"k": changed, "v": changed}), causal=True)
    assert torch.equal(before[3:], after[3:]) and not torch.equal(before[:3], after[:3])


def test_int64_offsets_serve_as_well():
    arguments = pack_arguments()
    wide = arguments["cu_seqlens_q"].long()
    given = ffpa_attn_varlen_func(**(arguments | {"cu_seqlens_q": wide, "cu_seqlens_k": wide}))
    assert torch.equal(given, ffpa_attn_varlen_func(**arguments))


def test_the_given_longest_lengths_change_nothing():
    arguments = pack_arguments()
    given = ffpa_attn_varlen_func(**(arguments | {"max_seqlen_q": 1, "max_seqlen_k": 1000}))
    assert torch.equal(given, ffpa_attn_varlen_func(**arguments))


def test_rows_after_the_last_document_give_zeros():
    arguments = pack_arguments()
    short = offsets([3, 2])
    out, lse = ffpa_attn_varlen_func(**(arguments | {"cu_seqlens_q": short}), return_lse=True)
    assert not out[5:].any() and (lse[:, 5:] == -torch.inf).all() and out[:5].any()


def test_a_pack_of_no_sequence_is_empty():
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    arguments = pack_arguments(cu_seqlens_q=none, cu_seqlens_k=none)
    assert not ffpa_attn_varlen_func(**arguments).any()
    empty = arguments["q"][:0]
    assert ffpa_attn_varlen_func(**(arguments | {"q": empty, "k": empty, "v": empty})).shape == (0, 2, 64)


def test_the_output_lies_as_a_packed_tensor():
    out = ffpa_attn_varlen_func(**pack_arguments(), causal=True)
    assert out.shape == (8, 2, 64)
    assert out.stride(-1) == 1


def test_dropout_in_a_pack_is_decided_by_the_seed():
    arguments = pack_arguments()
    torch.manual_seed(1)
    first = ffpa_attn_varlen_func(**arguments, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, ffpa_attn_varlen_func(**arguments, dropout_p=0.5))
    assert not torch.equal(first, ffpa_attn_varlen_func(**arguments))


def test_a_fused_projection_is_read_in_place():
    fused = torch.randn(8, 3, 2, 64, device=DEVICE)
    cu = offsets([3, 5])
    out = ffpa_attn_varlen_func(*fused.unbind(1), cu, cu, 5, 5)
    expected, _ = one_by_one(*fused.double().unbind(1), [3, 5], [3, 5])
    assert_close(out, expected, torch.float32)


def test_one_sequence_is_plain_attention():
    q = torch.randn(7, 2, 64, device=DEVICE)
    out = ffpa_attn_varlen_func(q, q, q, offsets([7]), offsets([7]), 7, 7, causal=True)
    plain = ffpa_attn_func(*(q.transpose(0, 1)[None],) * 3, is_causal=True)
    assert_close(out, plain[0].transpose(0, 1).double(), torch.float32)


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"q": torch.zeros(1, 8, 2, 64)}, ValueError, r"q must be a packed \[T, H, D\] tensor"),
        ({"k": None}, ValueError, "k must be a packed"),
        ({"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q must be a one-dimensional int32"),
        ({"cu_seqlens_k": [0, 3, 8]}, TypeError, "cu_seqlens_k must be"),
        ({"cu_seqlens_k": torch.zeros(0, dtype=torch.int32)}, ValueError, "at least one offset"),
        ({"cu_seqlens_k": torch.zeros(3, dtype=torch.int32, device="meta")}, ValueError, "cu_seqlens_k must .* be on"),
        ({"cu_seqlens_k": torch.zeros(4, dtype=torch.int32)}, ValueError, "holds 2 sequences and cu_seqlens_k 3"),
        ({"window_size": 3}, ValueError, r"window_size=3 is not allowed; use \(left, right\)"),
        ({"window_size": (1.5, 1)}, ValueError, r"window_size=\(1.5, 1\) is not allowed; .*whole numbers"),
        ({"causal": 1}, TypeError, "causal must be True or False, not 1"),
    ],
)
def test_packs_that_make_no_sense_raise(changes, error, text):
    arguments = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in pack_arguments().items()
    }
    with pytest.raises(error, match=text):
        ffpa_attn_varlen_func(**(arguments | changes))


def test_grouped_heads_can_be_forbidden():
    with pytest.raises(ValueError, match="enable_gqa=True"):
        ffpa_attn_varlen_func(**pack_arguments(4, 2), enable_gqa=False)


def test_one_key_head_broadcasts_even_then():
    assert ffpa_attn_varlen_func(**pack_arguments(4, 1), enable_gqa=False).shape == (8, 4, 64)


# --- any pack ---------------------------------------------------------------------------------------------------------


@st.composite
def packs(draw, backend: Served):
    """(query lengths, key lengths, leaves, options) of a legal call."""
    count = draw(st.integers(1, 5))
    lengths = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    q_lengths = draw(lengths)
    k_lengths = q_lengths if draw(st.booleans()) else draw(lengths)
    kv_heads, group, width = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([64, 72]))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    if k_lengths is q_lengths and group == 1 and draw(st.booleans()):  # slices of one fused projection
        fused = backend.randn(sum(q_lengths), 3, kv_heads, width)
        leaves = [part.detach().requires_grad_() for part in fused.unbind(1)]
    else:
        shapes = ((q_lengths, kv_heads * group), (k_lengths, kv_heads), (k_lengths, kv_heads))
        leaves = [backend.randn(sum(rows), heads, width).requires_grad_() for rows, heads in shapes]
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from([(-1, -1), (-1, -1), (0, 0), (2, 0), (3, -1), (-1, 1), (1, 2)])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "offsets_dtype": draw(st.sampled_from([torch.int32, torch.int64])),
        "return_lse": draw(st.booleans()),
    }
    return q_lengths, k_lengths, leaves, options


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_pack_gives_each_sequence_alone(backend: Served):
    few = backend.is_kernel and not HAS_GPU

    @settings(
        max_examples=6 if few else 60, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow],
        phases=(Phase.generate,) if few else tuple(Phase),  # the interpreter is too slow to shrink by
    )  # fmt: skip
    @given(packs(backend))
    def run(case):
        q_lengths, k_lengths, leaves, options = case
        check_pack(backend, q_lengths, k_lengths, leaves, **options)

    run()


def test_no_value_is_read_back_to_the_host():
    arguments = pack_arguments(4, 2)
    leaves = [arguments[name].requires_grad_() for name in ("q", "k")]

    class NoReadBack(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            assert operator not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
            return operator(*args, **(kwargs or {}))

    with NoReadBack():
        out = ffpa_attn_varlen_func(**arguments, causal=True, window_size=(2, 0), return_lse=True)[0]
        torch.autograd.grad(out.sum(), leaves)


def test_memory_of_the_mask_grows_with_the_length_alone():
    """Neither the intervals nor what the backward is told of them is of T x T elements."""
    rows, largest = 6000, 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            nonlocal largest
            result = operator(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return result

    cu = torch.arange(0, rows + 1, 500, dtype=torch.int32)
    with Largest():
        intervals = RowIntervals.packed(cu, cu, rows, causal=True)
        intervals.query_ranges(rows)
    assert 0 < largest <= rows * -(-rows // 64)  # a comparison of rows with blocks of 64 keys, in pieces
