"""The SDPA backend: what it hands to F.sdpa, what it computes itself, and in how much memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import DEVICE, assert_close, truth

from ffpa_hf import RowIntervals, explain, ffpa_attn_func
from ffpa_hf.call import AttentionCall
from ffpa_hf.kernels import sdpa
from ffpa_hf.kernels.common import Accepted, AttentionInputs, aligned
from ffpa_hf.kernels.sdpa import run as sdpa_run


def randn(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


@pytest.fixture
def handed(monkeypatch):
    """Arguments of every call to F.sdpa."""
    seen = []
    original = F.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        seen.append(
            dict(
                query=query,
                key=key,
                value=value,
                mask=attn_mask,
                p=dropout_p,
                causal=is_causal,
                scale=scale,
                gqa=enable_gqa,
            )
        )
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


def test_a_plain_call_is_handed_over_as_it_is(handed):
    query, key, value = (randn(1, 2, 6, 8, dtype=torch.float32) for _ in range(3))
    ffpa_attn_func(query, key, value, dropout_p=0.25, is_causal=True, scale=0.7, backend="sdpa")
    (given,) = handed
    assert given["query"] is query and given["key"] is key and given["value"] is value
    assert (given["mask"], given["p"], given["causal"], given["scale"], given["gqa"]) == (None, 0.25, True, 0.7, False)


def test_causal_stays_a_flag_and_is_never_made_dense(handed):
    query, key = randn(1, 2, 6, 8), randn(1, 2, 9, 8)
    ffpa_attn_func(query, key, key, is_causal=True)
    assert handed[0]["causal"] and handed[0]["mask"] is None


def test_broadcast_masks_are_not_expanded(handed):
    query = randn(2, 3, 6, 8, dtype=torch.float32)
    for shape in [(1, 1, 1, 6), (2, 1, 1, 6), (6, 6)]:
        keep = torch.ones(shape, dtype=torch.bool, device=DEVICE)
        ffpa_attn_func(query, query, query, keep)
        if DEVICE.type == "cpu":
            assert handed[-1]["mask"].numel() == keep.numel()


def test_intervals_key_mask_and_bias_become_one_mask():
    query = randn(2, 2, 5, 8)
    window = RowIntervals.sliding_window(5, 5, 2, DEVICE)
    present = torch.tensor([[True] * 5, [True] * 3 + [False] * 2], device=DEVICE)
    bias = randn(1, 2, 5, 5)
    inputs = AttentionInputs(
        query=query, key=query, value=query, scale=0.3, row_start=window.start, row_end=window.end, key_mask=present,
        bias=bias, mask=torch.rand(2, 1, 5, 5, device=DEVICE) > 0.2,
    )  # fmt: skip
    keep = window.dense(5) & present[:, None, None] & inputs.mask
    dense = sdpa_run.dense_mask(inputs)
    assert torch.equal(dense, torch.where(keep, bias, -torch.inf))
    assert sdpa_run.dense_mask(AttentionInputs(query=query, key=query, value=query, scale=1.0)) is None
    for composite in (False, True):
        out, _ = sdpa.forward(inputs, composite=composite)
        assert_close(out, truth(query, query, query, bias, keep=keep, scale=0.3)[0], torch.float64)


@pytest.mark.parametrize(
    "changes, lacking",
    [
        ({}, None),
        ({"dropout_p": 0.5}, None),
        ({"is_causal": True}, None),
        ({"mask_kind": "bool"}, None),
        ({"mask_kind": "intervals"}, None),
        ({"has_bias": True, "bias_dtype": torch.bfloat16}, None),
        ({"return_lse": True}, "log-sum-exp"),
        ({"softcap": 1.0}, "softcap"),
        ({"has_sinks": True}, "sinks"),
        ({"has_bias": True, "bias_dtype": torch.float32}, "float32 bias beside bfloat16"),
    ],
)
def test_it_serves_everything_and_says_by_which_route(changes, lacking):
    call = AttentionCall(1, 2, 2, 16, 16, 64, 64, torch.bfloat16, "cpu", **changes)
    answer = sdpa.supports(call)
    assert isinstance(answer, Accepted)
    assert (lacking is None) == (answer.note == "F.scaled_dot_product_attention")
    if lacking is not None:
        assert lacking in answer.note and "plain torch" in answer.note


@pytest.mark.parametrize("more", [{"softcap": 4.0}, {"return_lse": True}, {"sinks": torch.zeros(2, device=DEVICE)}])
def test_what_f_sdpa_lacks_never_reaches_it(more, handed):
    query = randn(1, 2, 6, 8)
    plan = explain(query, query, query, **more, backend="sdpa")
    ffpa_attn_func(query, query, query, **more, backend="sdpa")
    assert plan.composite and handed == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_composite_computes_halves_in_float32(dtype):
    # 1000 halves of equal weight: a half-precision sum would be far off.
    query, key = (
        torch.zeros(1, 1, 1, 64, dtype=dtype, device=DEVICE),
        torch.zeros(1, 1, 3000, 64, dtype=dtype, device=DEVICE),
    )
    value = torch.full((1, 1, 3000, 64), 0.3, dtype=dtype, device=DEVICE)
    out, lse = ffpa_attn_func(query, key, value, return_lse=True, backend="sdpa")
    assert torch.equal(out, value[:, :, :1]) and abs(lse.item() - torch.tensor(3000.0).log().item()) < 1e-4


def test_long_composites_hold_one_chunk_of_scores_at_a_time(monkeypatch):
    monkeypatch.setattr(sdpa_run, "_CHUNK_ELEMENTS", 2 * 50 * 4)
    seen = []
    original = sdpa_run.attention
    monkeypatch.setattr(sdpa_run, "attention", lambda q, *a, **k: seen.append(q.shape[2]) or original(q, *a, **k))
    query, key = randn(1, 2, 30, 8), randn(1, 2, 50, 8)
    query.requires_grad_()
    out, _ = ffpa_attn_func(query, key, key, return_lse=True, backend="sdpa")
    assert max(seen) == 4 and sum(seen) == 30
    out.sum().backward()
    assert max(seen) == 4 and sum(seen) == 60  # recomputed, not kept


def test_gradients_by_recomputation_are_right_and_only_those_needed():
    query, key, value = randn(1, 2, 5, 8), randn(1, 1, 7, 8), randn(1, 1, 7, 8)
    bias, sinks = randn(1, 1, 5, 7), randn(2)
    inputs = AttentionInputs(query=query, key=key, value=value, scale=0.4, bias=bias, sinks=sinks)
    leaves = [t.clone().requires_grad_() for t in (query, key, value, bias, sinks)]
    out, lse = truth(*leaves, scale=0.4)
    seeds = (torch.randn_like(out), torch.randn_like(lse).float())
    expected = torch.autograd.grad([out, lse], leaves, [seeds[0], seeds[1].double()])
    found = sdpa.backward(inputs, *seeds, (True,) * 5)
    for gradient, wanted in zip(found, expected, strict=True):
        # A float32 log-sum-exp stands between.
        assert_close(gradient, wanted, torch.float32)
    some = sdpa.backward(inputs, *seeds, (False, True, False, False, True))
    assert [gradient is not None for gradient in some] == [False, True, False, False, True]
    assert not query.requires_grad  # the caller's tensors are left alone


# --- one copy at the door, and only where it must be ------------------------------------------------------------------


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


@pytest.mark.parametrize(
    "tensor",
    [
        half(2, 3, 5, 64),
        half(2, 5, 3, 64).transpose(1, 2),
        half(2, 5, 3, 3, 64)[:, :, 1].transpose(1, 2),
        half(1, 1, 5, 64).expand(2, 3, 5, 64),
        half(2, 3, 5, 72)[..., :64],
        half(2, 3, 5, 72)[..., 8:],
        half(2, 3, 9, 64)[:, :, 4:],
        torch.randn(2, 3, 1, 65).half()[:1, :1, :, :64],
    ],
    ids=["plain", "transposed", "fused", "expanded", "padded by 8", "offset by 8", "later rows", "single row"],
)
def test_layouts_that_kernels_can_read_are_not_copied(tensor):
    assert aligned(tensor) is tensor


@pytest.mark.parametrize(
    "tensor",
    [
        half(2, 3, 5, 65)[..., :64],
        half(2, 3, 5, 65)[..., 1:],
        half(2 * 3 * 5 * 64 + 1)[1:].view(2, 3, 5, 64),
        half(2, 3, 5, 128)[..., ::2],
        half(2, 3, 64, 5).transpose(2, 3),
        half(2, 3, 1, 64).expand(2, 3, 5, 64),
        half(4)[1:2].expand(2, 3, 5, 64),
    ],
    ids=["padded by 1", "both", "offset by 1", "every other", "width first", "one row for all", "one number"],
)
def test_layouts_that_kernels_cannot_read_are_copied_once(tensor):
    copy = aligned(tensor)
    assert torch.equal(copy, tensor) and copy.stride(-1) == 1 and copy.data_ptr() % 16 == 0
    assert all(stride * 2 % 16 == 0 for size, stride in zip(copy.shape[:-1], copy.stride(), strict=False) if size > 1)
    assert aligned(copy) is copy
