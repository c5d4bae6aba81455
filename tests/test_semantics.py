"""What attention means here, the same for every backend: plain and causal calls, shared heads, softcap and sinks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from oracle import BACKENDS, DEVICE, SDPA, Served, across, assert_close, compare, truth
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from ffpa_hf import RowIntervals, ffpa_attn_func

every_backend = pytest.mark.parametrize("backend", BACKENDS)
SDPA_ONLY = pytest.mark.parametrize("backend", SDPA)
N = 10


def top_left(rows: int, keys: int) -> torch.Tensor:
    return torch.arange(keys, device=DEVICE) <= torch.arange(rows, device=DEVICE)[:, None]


# --- plain ------------------------------------------------------------------------------------------------------------


@across(
    "rows, keys, heads, kv_heads, width",
    [(10, 10, 2, 2, 64), (33, 70, 4, 2, 64), (70, 33, 4, 1, 72), (1, 130, 4, 2, 64), (65, 65, 1, 1, 72)],
    quick=(1, 4),
)
def test_output_lse_and_gradients_are_those_of_attention(backend: Served, rows, keys, heads, kv_heads, width):
    tensors = backend.qkv(2, heads, rows, keys, width, kv_heads)
    gqa = heads != kv_heads
    if not backend.is_kernel:  # F.sdpa itself here, the composite below
        compare(lambda query, key, value: backend(query, key, value, enable_gqa=gqa), tensors)
    compare(lambda query, key, value: backend(query, key, value, enable_gqa=gqa, return_lse=True), tensors)


@across("scale", [0.0, -0.3, 0.7, 1], quick=(0, 1))
def test_scale_is_taken_literally(backend: Served, scale):
    compare(lambda **t: backend(**t, scale=scale, return_lse=True), backend.qkv(), {"scale": scale})
    if not backend.is_kernel:
        compare(lambda **t: backend(**t, scale=scale), backend.qkv(), {"scale": scale})


@every_backend
def test_scale_zero_averages_the_values(backend: Served):
    tensors = backend.qkv()
    out = backend(**tensors, scale=0.0)
    assert_close(out, tensors["value"].double().mean(2, keepdim=True).expand_as(out), backend.dtype)


@SDPA_ONLY
@pytest.mark.parametrize("width", [8, 20, 63, 320])
def test_head_dims_without_a_kernel_are_served_too(backend: Served, width):
    compare(lambda **t: backend(**t, return_lse=True), backend.qkv(width=width))
    compare(lambda **t: backend(**t), backend.qkv(width=width))


@SDPA_ONLY
def test_value_may_have_another_width(backend: Served):
    tensors = backend.qkv(width=64) | {"value": backend.randn(2, 2, 10, 24)}
    compare(lambda **t: backend(**t), tensors)
    compare(lambda **t: backend(**t, return_lse=True), tensors)
    assert ffpa_attn_func(*tensors.values()).shape == (2, 2, 10, 24)


@SDPA_ONLY
@pytest.mark.parametrize("rank", [2, 3, 5])
def test_other_ranks_mean_what_f_sdpa_means(backend: Served, rank):
    shape = {2: (10, 64), 3: (3, 10, 64), 5: (2, 3, 2, 10, 64)}[rank]
    query, key, value = (backend.randn(*shape) for _ in range(3))
    keep = torch.rand(10, 10, device=DEVICE) > 0.3
    for keywords in ({}, {"is_causal": True}, {"attn_mask": keep}):
        expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **keywords)
        assert_close(ffpa_attn_func(query, key, value, **keywords), expected, backend.dtype)
    if rank < 5:
        out, lse = ffpa_attn_func(query, key, value, return_lse=True)
        assert lse.shape == shape[:-1] and lse.dtype == torch.float32


def test_a_three_dimensional_mask_follows_three_dimensional_tensors():
    query, key, value = (torch.randn(3, 6, 64, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(3, 6, 6, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert_close(ffpa_attn_func(query, key, value, mask), expected, torch.float64)


def test_three_dimensions_are_heads_first_as_for_f_sdpa():
    query, key = torch.randn(4, 6, 64), torch.randn(2, 6, 64)
    expected = F.scaled_dot_product_attention(query.double(), key.double(), key.double(), enable_gqa=True)
    assert_close(ffpa_attn_func(query, key, key, enable_gqa=True), expected, torch.float32)
    sinks = torch.randn(4)
    out, lse = ffpa_attn_func(query, key, key, enable_gqa=True, sinks=sinks, return_lse=True)
    exact, exact_lse = truth(query[None].double(), key[None].double(), key[None].double(), sinks=sinks.double())
    assert_close(out, exact[0], torch.float32)
    assert_close(lse, exact_lse[0], torch.float32)


def test_five_dimensions_share_key_heads_as_f_sdpa_does():
    query, key = torch.randn(2, 3, 4, 6, 64), torch.randn(2, 3, 2, 6, 64)
    expected = F.scaled_dot_product_attention(query.double(), key.double(), key.double(), enable_gqa=True)
    assert_close(ffpa_attn_func(query, key, key, enable_gqa=True), expected, torch.float32)


def test_five_dimensions_with_mask_and_is_causal_raise():
    query = torch.randn(2, 3, 4, 6, 64)
    with pytest.raises(ValueError, match="attn_mask and is_causal"):
        ffpa_attn_func(query, query, query, torch.ones(6, 6, dtype=torch.bool), is_causal=True)


@pytest.mark.parametrize("more", [{"softcap": 3.0}, {"return_lse": True}, {"sinks": torch.zeros(4)}])
def test_five_dimensions_refuse_what_they_would_lose(more):
    query = torch.randn(2, 3, 4, 6, 64)
    with pytest.raises(NotImplementedError, match=next(iter(more))):
        ffpa_attn_func(query, query, query, **more)


def test_missing_leading_dimensions_broadcast_as_in_sdpa():
    query = torch.randn(2, 3, 8, 16, device=DEVICE)
    key = torch.randn(3, 8, 16, device=DEVICE)
    torch.testing.assert_close(ffpa_attn_func(query, key, key), F.scaled_dot_product_attention(query, key, key))


# --- causal -----------------------------------------------------------------------------------------------------------


@across("rows, keys", [(2, 5), (5, 2), (1, 7), (10, 10), (70, 130), (130, 70)], quick=(0, 1, 2))
def test_causal_is_top_left_at_every_length(backend: Served, rows, keys):
    tensors = backend.qkv(1, 2, rows, keys)
    expected = {"keep": top_left(rows, keys)}
    if not backend.is_kernel:
        compare(lambda **t: backend(**t, is_causal=True), tensors, expected)
    compare(lambda **t: backend(**t, is_causal=True, return_lse=True), tensors, expected)


@SDPA_ONLY
def test_causal_stays_top_left_past_the_routing_thresholds(backend: Served):
    tensors = backend.qkv(1, 1, 600, 1100)
    compare(lambda **t: backend(**t, is_causal=True), tensors, {"keep": top_left(600, 1100)})


@every_backend
@pytest.mark.parametrize("mask", ["bool", "float", "intervals", "bias object"])
def test_a_mask_beside_is_causal_raises(backend: Served, mask):
    masks = {
        "bool": torch.ones(10, 10, dtype=torch.bool, device=DEVICE),
        "float": torch.zeros(10, 10, device=DEVICE),
        "intervals": RowIntervals.full(10, 10, DEVICE),
        "bias object": causal_upper_left(10, 10),
    }
    with pytest.raises(ValueError, match="attn_mask and is_causal=True"):
        ffpa_attn_func(*backend.qkv().values(), attn_mask=masks[mask], is_causal=True, backend=backend.name)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@across("rows, keys", [(5, 9), (9, 5), (7, 7)])
def test_torch_causal_bias_objects_keep_their_alignment(backend: Served, rows, keys):
    tensors = backend.qkv(2, 2, rows, keys)
    row, key = torch.arange(rows, device=DEVICE)[:, None], torch.arange(keys, device=DEVICE)
    compare(lambda **t: backend(**t, attn_mask=causal_upper_left(rows, keys)), tensors, {"keep": key <= row})
    lower = key <= row + keys - rows
    compare(lambda **t: backend(**t, attn_mask=causal_lower_right(rows, keys)), tensors, {"keep": lower})
    compare(
        lambda **t: backend(**t, attn_mask=RowIntervals.causal_lower_right(rows, keys, device=DEVICE)),
        tensors,
        {"keep": lower},
    )


def test_a_causal_bias_of_another_size_raises():
    query = torch.randn(1, 1, 5, 64)
    with pytest.raises(ValueError, match="CausalBias of 4 x 5; the call has 5 x 5"):
        ffpa_attn_func(query, query, query, causal_lower_right(4, 5))


# --- heads and batch --------------------------------------------------------------------------------------------------


def _serve(function, *tensors, **keywords):
    try:
        return function(*tensors, **keywords)
    except (RuntimeError, ValueError):
        return None


@pytest.mark.parametrize("gqa", [False, True], ids=["plain", "gqa"])
def test_heads_broadcast_exactly_where_f_sdpa_broadcasts(gqa):
    for q_heads, k_heads, v_heads in itertools.product([1, 2, 3, 4, 6], repeat=3):
        query, key, value = torch.randn(2, q_heads, 3, 8), torch.randn(2, k_heads, 4, 8), torch.randn(2, v_heads, 4, 8)
        expected = _serve(F.scaled_dot_product_attention, query, key, value, enable_gqa=gqa)
        given = _serve(ffpa_attn_func, query, key, value, enable_gqa=gqa)
        assert (expected is None) == (given is None), (q_heads, k_heads, v_heads)
        if expected is not None:
            assert_close(given, expected.double(), torch.float32, f"{q_heads}:{k_heads}:{v_heads}")


def test_batches_broadcast_exactly_where_f_sdpa_broadcasts():
    for batches in itertools.product([1, 2, 3], repeat=3):
        tensors = [torch.randn(batch, 2, 3, 8) for batch in batches]
        expected = _serve(F.scaled_dot_product_attention, *tensors)
        given = _serve(ffpa_attn_func, *tensors)
        assert (expected is None) == (given is None), batches
        if expected is not None:
            assert_close(given, expected.double(), torch.float32, str(batches))


@across("shapes", [(2, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_a_broadcast_batch_or_head_has_the_summed_gradient(backend: Served, shapes):
    q, k, v = shapes
    tensors = {
        "query": backend.randn(q, 2, 5, 64),
        "key": backend.randn(k, 2, 7, 64),
        "value": backend.randn(v, 2, 7, 64),
    }
    compare(lambda **t: backend(**t), tensors)
    tensors = {name: tensor.transpose(0, 1).detach() for name, tensor in tensors.items()}
    compare(lambda **t: backend(**t), tensors)


@across("k_heads, v_heads", [(2, 4), (4, 2), (1, 2), (2, 1)], quick=(3,))
def test_gqa_takes_key_and_value_of_unequal_heads(backend: Served, k_heads, v_heads):
    tensors = {
        "query": backend.randn(2, 4, 5, 64),
        "key": backend.randn(2, k_heads, 7, 64),
        "value": backend.randn(2, v_heads, 7, 64),
    }
    expected = F.scaled_dot_product_attention(*(t.double() for t in tensors.values()), enable_gqa=True)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    assert_close(truth(**exact)[0], expected, torch.float64)
    compare(lambda **t: backend(**t, enable_gqa=True), tensors)


@across("kv_heads", [2, 1])
def test_query_heads_share_key_heads_in_order_with_every_kind_of_mask(backend: Served, kv_heads):
    tensors = backend.qkv(2, 4, N, N, kv_heads=kv_heads)
    keep = torch.rand(2, 4, N, N, device=DEVICE) > 0.3
    keep[..., 0] = True
    compare(lambda **t: backend(**t, attn_mask=keep, enable_gqa=True), tensors, {"keep": keep})
    compare(lambda **t: backend(**t, is_causal=True, enable_gqa=True), tensors, {"keep": top_left(N, N)})
    compare(lambda **t: backend(**t, enable_gqa=True, return_lse=True), tensors)
    bias = backend.randn(1, 4, N, N)
    compare(lambda bias, **t: backend(**t, attn_mask=bias, enable_gqa=True), tensors | {"bias": bias})


@every_backend
def test_unequal_heads_without_enable_gqa_raise(backend: Served):
    with pytest.raises(ValueError, match="query has 4 heads, key 2.*enable_gqa=True"):
        ffpa_attn_func(*backend.qkv(1, 4, kv_heads=2).values(), backend=backend.name)
    with pytest.raises(ValueError, match="multiple"):
        ffpa_attn_func(*backend.qkv(1, 4, kv_heads=3).values(), enable_gqa=True, backend=backend.name)


@pytest.mark.parametrize("width", [64, 320])
def test_the_fallback_repeats_shared_heads_where_no_fused_kernel_takes_them(width, monkeypatch):
    seen = []
    original = F.scaled_dot_product_attention

    def spy(*args, **keywords):
        seen.append((args, keywords))
        return original(*args, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    query, key = torch.randn(1, 4, 6, width), torch.randn(1, 2, 6, width)
    ffpa_attn_func(query, key, key, enable_gqa=True, backend="sdpa")
    (_, given_key, _), keywords = seen[0][0][:3], seen[0][1]
    if not keywords.get("enable_gqa"):
        assert given_key.shape[1] == 4
    assert width <= 256 or not keywords.get("enable_gqa")


def test_the_fallback_materialises_expanded_keys_beside_a_mask(monkeypatch):
    seen = []
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: seen.append(a) or original(*a, **k))
    query, key = torch.randn(1, 4, 6, 64), torch.randn(1, 1, 6, 64).expand(1, 4, 6, 64)
    ffpa_attn_func(query, key, key, torch.ones(6, 6, dtype=torch.bool))
    assert all(0 not in tensor.stride() for tensor in seen[0][1:3])
    ffpa_attn_func(query, key, key)
    assert all(0 in tensor.stride() for tensor in seen[1][1:3])  # nothing is copied without need


# --- softcap and sinks ------------------------------------------------------------------------------------------------


@across("causal", [True, False])
def test_softcap_bounds_the_scores_before_the_mask(backend: Served, causal):
    tensors = backend.qkv()
    tensors["query"] = tensors["query"] * 4
    keep = top_left(N, N) if causal else None
    compare(
        lambda **t: backend(**t, softcap=1.5, is_causal=causal, return_lse=True),
        tensors,
        {"softcap": 1.5, "keep": keep},
    )
    bias = backend.randn(1, 2, N, N) * 3
    compare(lambda bias, **t: backend(**t, attn_mask=bias, softcap=1.5), tensors | {"bias": bias}, {"softcap": 1.5})


@pytest.mark.parametrize("softcap", [0.0, -1.0, math.nan])
def test_a_softcap_that_is_no_positive_number_raises(softcap):
    query = torch.randn(1, 1, 4, 64)
    with pytest.raises(ValueError, match="softcap=.*above 0"):
        ffpa_attn_func(query, query, query, softcap=softcap)


@across("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], quick=(2,))
def test_sinks_take_part_in_the_softmax_and_have_a_gradient(backend: Served, dtype):
    tensors = backend.qkv(2, 4, kv_heads=2) | {"sinks": backend.randn(4, dtype=dtype)}
    compare(lambda **t: backend(**t, enable_gqa=True, return_lse=True), tensors)
    compare(lambda **t: backend(**t, enable_gqa=True, is_causal=True), tensors, {"keep": top_left(N, N)})


@every_backend
def test_sinks_of_minus_infinity_are_no_sinks(backend: Served):
    tensors = backend.qkv()
    sinks = torch.full((2,), -torch.inf, device=DEVICE)
    out, lse = backend(**tensors, sinks=sinks, return_lse=True)
    expected, expected_lse = truth(**{name: tensor.double() for name, tensor in tensors.items()})
    assert_close(out, expected, backend.dtype)
    assert_close(lse, expected_lse, backend.dtype)


@every_backend
def test_a_row_without_keys_has_the_sink_alone(backend: Served):
    keep = torch.rand(N, N, device=DEVICE) > 0.3
    keep[4] = False
    sinks = torch.tensor([0.5, -2.0], device=DEVICE)
    tensors = backend.qkv() | {"sinks": sinks}
    compare(lambda **t: backend(**t, attn_mask=keep, return_lse=True), tensors, {"keep": keep})
    out, lse = backend(**tensors, attn_mask=keep, return_lse=True)
    assert not out[:, :, 4].any()
    assert torch.equal(lse[:, :, 4], sinks.expand(2, 2))


@pytest.mark.parametrize(
    "sinks, error, text",
    [
        (torch.zeros(3), ValueError, r"sinks has shape \(3,\); \(2,\) is needed"),
        (torch.zeros(1, 2), ValueError, "sinks has shape"),
        (torch.zeros(2, dtype=torch.int64), TypeError, "sinks must be a floating tensor"),
        ([0.0, 0.0], TypeError, "sinks must be a floating tensor"),
    ],
)
def test_wrong_sinks_raise(sinks, error, text):
    query = torch.randn(1, 2, 4, 64)
    with pytest.raises(error, match=text):
        ffpa_attn_func(query, query, query, sinks=sinks)


# --- devices and arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", ["key", "value", "attn_mask", "sinks", "intervals"])
def test_tensors_on_two_devices_raise(elsewhere):
    tensors = {name: torch.randn(1, 2, 4, 64) for name in ("query", "key", "value")}
    more = {"attn_mask": torch.ones(4, 4, dtype=torch.bool), "sinks": torch.zeros(2)}
    if elsewhere in tensors:
        tensors[elsewhere] = tensors[elsewhere].to("meta")
    elif elsewhere == "intervals":
        more["attn_mask"] = RowIntervals.full(4, 4, "meta")
    else:
        more[elsewhere] = more[elsewhere].to("meta")
    with pytest.raises(ValueError, match="one device is needed"):
        ffpa_attn_func(**tensors, **more)


def test_tensors_on_the_meta_device_give_a_shape():
    query, key = torch.randn(2, 4, 6, 64, device="meta"), torch.randn(2, 4, 9, 64, device="meta")
    out = ffpa_attn_func(query, key, key)
    assert out.device.type == "meta" and out.shape == (2, 4, 6, 64)


@pytest.mark.parametrize(
    "shapes, text",
    [
        (((1, 1, 4, 64), (1, 1, 4, 32), (1, 1, 4, 64)), "query is 64 wide and key 32"),
        (((1, 1, 4, 64), (1, 1, 4, 64), (1, 1, 5, 64)), "key has 4 positions and value 5"),
        (((1, 1, 4, 64), (64,), (64,)), "two dimensions or more"),
        (((64,), (64,), (64,)), "two dimensions or more"),
        (((2, 1, 4, 64), (3, 1, 4, 64), (3, 1, 4, 64)), "batch"),
    ],
)
def test_shapes_that_do_not_fit_raise(shapes, text):
    with pytest.raises(ValueError, match=text):
        ffpa_attn_func(*(torch.randn(shape) for shape in shapes))


def test_an_argument_that_is_no_tensor_raises():
    query = torch.randn(1, 1, 4, 64)
    with pytest.raises(TypeError, match="key must be a tensor, not NoneType"):
        ffpa_attn_func(query, None, query)
