"""The definition of the operation against an independent one, and the dropout generator against published numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import assert_close, truth

from ffpa_hf import RowIntervals
from ffpa_hf.kernels.philox import drop_threshold, philox_keep_mask, philox_words
from ffpa_hf.kernels.reference import attention, hidden_keys

F64 = torch.float64


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64)


def qkv(batch=2, heads=4, kv_heads=2, rows=5, keys=7, width=8):
    return {
        "query": randn(batch, heads, rows, width),
        "key": randn(batch, kv_heads, keys, width),
        "value": randn(batch, kv_heads, keys, width),
    }


CASES = {
    "plain": ({}, {}, {}),
    "negative scale": ({}, {"scale": -0.4}, {"scale": -0.4}),
    "scale zero": ({}, {"scale": 0.0}, {"scale": 0.0}),
    "causal": ({}, {"is_causal": True}, {"keep": torch.ones(5, 7, dtype=torch.bool).tril()}),
    "softcap": ({}, {"softcap": 1.2}, {"softcap": 1.2}),
    "bias": ({"bias": randn(1, 4, 5, 7)}, {}, {}),
    "bias for all rows": ({"bias": randn(2, 1, 1, 7)}, {}, {}),
    "sinks": ({"sinks": randn(4)}, {}, {}),
    "everything": ({"bias": randn(1, 1, 5, 7), "sinks": randn(4)}, {"softcap": 2.0}, {"softcap": 2.0}),
}


def both(tensors, options, expected):
    """Outputs and gradients of the definition and of the oracle."""
    results = []
    for function, keywords in ((attention, {"scale": 8**-0.5} | options), (truth, expected)):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        out, lse = function(**leaves, **keywords)
        torch.manual_seed(3)
        seeds = [torch.randn_like(out), torch.randn_like(lse)]
        results.append((out, lse, *torch.autograd.grad([out, lse], list(leaves.values()), seeds)))
    return results


@pytest.mark.parametrize("case", CASES)
def test_the_definition_is_attention(case):
    more, options, expected = CASES[case]
    for given, wanted in zip(*both(qkv() | more, options, expected), strict=True):
        assert_close(given, wanted, F64, case)


@pytest.mark.parametrize("batch", [1, 2])
def test_masks_and_intervals_hide_keys_and_dead_rows_are_zero(batch):
    mask = torch.rand(batch, 1, 5, 7) > 0.5
    start, end = torch.randint(0, 4, (batch, 5)), torch.randint(2, 9, (batch, 5))
    start[:, 2] = end[:, 2] = 3  # nothing to see
    present = torch.rand(batch, 7) > 0.2
    key = torch.arange(7)
    keep = mask & ((key >= start[..., None]) & (key < end[..., None]))[:, None] & present[:, None, None]
    options = {"mask": mask, "row_start": start.int(), "row_end": end.int(), "key_mask": present}
    given, wanted = both(qkv(batch=2), options, {"keep": keep})
    for one, other in zip(given, wanted, strict=True):
        assert_close(one, other, F64)
    assert not given[0][:, :, 2].any() and (given[1][:, :, 2] == -torch.inf).all() and not given[2][:, :, 2].any()


def test_nothing_hidden_is_none():
    assert hidden_keys(3, 4, torch.device("cpu"), False, None, None, None, None) is None


def test_a_run_of_rows_is_that_part_of_the_whole():
    tensors = qkv(rows=9)
    whole, whole_lse = attention(**tensors, scale=0.3, is_causal=True)
    part = tensors | {"query": tensors["query"][:, :, 4:7]}
    out, lse = attention(**part, scale=0.3, is_causal=True, first_row=4)
    assert_close(out, whole[:, :, 4:7], F64)
    assert_close(lse, whole_lse[:, :, 4:7], F64)


def test_dropout_scales_what_it_keeps_after_the_softmax():
    tensors = qkv()
    keep = torch.rand(2, 4, 5, 7) > 0.4
    given, wanted = both(tensors, {"keep": keep, "dropout_p": 0.4}, {"drop": keep.double() / 0.6})
    for one, other in zip(given, wanted, strict=True):
        assert_close(one, other, F64)


def test_its_gradients_pass_a_numeric_check():
    tensors = qkv(1, 2, 1, 3, 4, 4) | {"bias": randn(1, 1, 3, 4), "sinks": randn(2)}
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]

    def run(query, key, value, bias, sinks):
        return attention(query, key, value, scale=0.5, softcap=2.0, bias=bias, sinks=sinks, is_causal=True)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("rows, keys", [(0, 4), (4, 0), (0, 0)])
def test_nothing_to_attend_to_is_zero(rows, keys):
    out, lse = attention(**qkv(rows=rows, keys=keys), scale=1.0)
    assert out.shape == (2, 4, rows, 8) and not out.any() and (lse == -torch.inf).all()


def test_intervals_and_their_dense_mask_are_one():
    intervals = RowIntervals.sliding_window(5, 7, 3)
    tensors = qkv()
    one, _ = attention(**tensors, scale=1.0, row_start=intervals.start, row_end=intervals.end)
    other, _ = attention(**tensors, scale=1.0, mask=intervals.dense(7))
    assert torch.equal(one, other)


# --- which probabilities dropout keeps --------------------------------------------------------------------------------

#: Published answers of Philox 4x32-10 (the known-answer tests of Random123): counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def scalar(value: int) -> torch.Tensor:
    return torch.tensor(value if value < 2**63 else value - 2**64, dtype=torch.int64)


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_the_generator_gives_the_published_words(counter, key, words):
    given = philox_words(tuple(scalar(part) for part in counter), scalar(key[0] | key[1] << 32))
    assert tuple(word.item() for word in given) == words


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 on Python's own integers."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@pytest.mark.parametrize("seed, offset", [(0, 0), (12345, 7), (2**62 - 1, 2**61 + 3), (2**40, 2**32)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 0.999])
def test_the_kept_probabilities_follow_the_counter_map(seed, offset, dropout_p):
    batch, heads, rows, keys = 2, 3, 3, 6
    state = torch.tensor([seed, offset], dtype=torch.int64)
    keep = philox_keep_mask(state, batch, heads, rows, keys, dropout_p)
    assert keep.shape == (batch, heads, rows, keys) and keep.dtype == torch.bool
    for b, h, q, k in itertools.product(range(batch), range(heads), range(rows), range(keys)):
        counter = [k // 4, q, b * heads + h, offset & 0xFFFFFFFF]
        word = philox_by_hand(counter, [seed & 0xFFFFFFFF, seed >> 32])[k % 4]
        assert keep[b, h, q, k].item() == (word >= round(dropout_p * 2**32))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_the_share_of_kept_probabilities_is_right(dropout_p):
    keep = philox_keep_mask(torch.tensor([3, 4]), 2, 2, 128, 128, dropout_p).double()
    assert abs(keep.mean().item() - (1 - dropout_p)) < 0.01
    assert (keep.mean((0, 1)) - (1 - dropout_p)).abs().mean() < 0.5
    assert abs(torch.corrcoef(torch.stack([keep[..., 1:].flatten(), keep[..., :-1].flatten()]))[0, 1]) < 0.03


def test_a_longer_call_keeps_the_same_in_its_beginning():
    state = torch.tensor([3, 4])
    small, large = philox_keep_mask(state, 1, 1, 5, 7, 0.5), philox_keep_mask(state, 1, 1, 9, 30, 0.5)
    assert torch.equal(small, large[:, :, :5, :7])


def test_other_seeds_and_offsets_drop_others():
    masks = [philox_keep_mask(torch.tensor(state), 1, 1, 16, 16, 0.5) for state in ([0, 0], [1, 0], [0, 1], [2**32, 0])]
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(masks, 2))


def test_the_threshold_is_the_probability_in_32_bits():
    assert [drop_threshold(p) for p in (0.0, 0.5, 0.25, 1.0)] == [0, 2**31, 2**30, 2**32]
