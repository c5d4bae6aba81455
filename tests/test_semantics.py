"""What attention means here, the same for every backend; each test says what a user would see. Judged in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from oracle import BACKENDS, DEVICE, KERNELS, SDPA, TOLERANCE, Served, across, assert_close, compare, truth
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

from ffpa_hf import RowIntervals, ffpa_attn_func
from ffpa_hf.kernels.sdpa import run as sdpa_run

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kernel = pytest.mark.parametrize("backend", KERNELS)
SDPA_ONLY = pytest.mark.parametrize("backend", SDPA)


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


# --- masks ------------------------------------------------------------------------------------------------------------

N = 10
MASK_SHAPES = [
    (N, N),
    (1, 1, N, N),
    (2, 1, 1, N),
    (1, 2, 1, N),
    (2, 1, N, N),
    (2, 2, N, N),
    (1, 2, N, 1),
    (1, N),
    (2, 2, 1, 1),
]


@across("shape", MASK_SHAPES, quick=(2, 3, 4))
def test_bool_masks_keep(backend: Served, shape):
    keep = torch.rand(shape, device=DEVICE) > 0.4
    if keep.shape[-1] != 1:
        keep[..., 0] = True
    tensors = backend.qkv()
    if not backend.is_kernel:
        compare(lambda **t: backend(**t, attn_mask=keep), tensors, {"keep": keep})
    compare(lambda **t: backend(**t, attn_mask=keep, return_lse=True), tensors, {"keep": keep})


@across("shape", MASK_SHAPES, quick=(0, 2, 3, 4))
def test_float_masks_add_and_have_a_gradient(backend: Served, shape):
    for dtype in {backend.dtype, torch.float32}:
        tensors = backend.qkv() | {"bias": backend.randn(*shape, dtype=dtype)}
        gradients = compare(lambda query, key, value, bias: backend(query, key, value, bias), tensors)
        assert gradients["bias"].shape == shape


@every_backend
def test_bool_minus_infinity_and_finite_minimum_mask_alike(backend: Served):
    keep = torch.rand(2, 1, N, N, device=DEVICE) > 0.4
    keep[..., 0] = True
    tensors = backend.qkv()
    for filler in (-torch.inf, torch.finfo(torch.float32).min):
        bias = torch.zeros(keep.shape, device=DEVICE).masked_fill(~keep, filler)
        compare(lambda *, bias=bias, **t: backend(**t, attn_mask=bias), tensors, {"keep": keep})
    compare(lambda **t: backend(**t, attn_mask=keep), tensors, {"keep": keep})


@every_backend
def test_a_float_mask_of_ones_and_zeros_adds_ones(backend: Served):
    bias = (torch.rand(N, N, device=DEVICE) > 0.5).to(backend.dtype)
    compare(lambda **t: backend(**t, attn_mask=bias), backend.qkv(), {"keep": None, "bias": bias.double()})


DEAD = {
    "bool": lambda keep, dtype: keep,
    "-inf": lambda keep, dtype: torch.zeros(keep.shape, dtype=dtype, device=DEVICE).masked_fill(~keep, -torch.inf),
    "-inf float32": lambda keep, dtype: torch.zeros(keep.shape, device=DEVICE).masked_fill(~keep, -torch.inf),
}


@across("form, return_lse", list(itertools.product(DEAD, (False, True))), quick=(0, 5))
def test_rows_without_keys_give_zeros_and_no_gradient(backend: Served, form, return_lse):
    keep = torch.rand(2, 1, N, N, device=DEVICE) > 0.4
    keep[..., 0] = True
    keep[0, 0, 3] = False
    keep[1] = False  # a whole batch item
    mask = DEAD[form](keep, backend.dtype)
    tensors = backend.qkv()
    gradients = compare(
        lambda **t: backend(**t, attn_mask=mask, return_lse=return_lse), tensors, {"keep": keep}, needs=tuple(tensors)
    )
    result = backend(**tensors, attn_mask=mask, return_lse=return_lse)
    out = result[0] if return_lse else result
    assert not out[0, :, 3].any() and not out[1].any()
    assert not gradients["query"][0, :, 3].any() and not any(gradients[name][1].any() for name in tensors)
    if return_lse:
        assert (result[1][1] == -torch.inf).all() and (result[1][0, :, 3] == -torch.inf).all()


@every_backend
def test_a_minus_infinity_mask_with_a_gradient_has_no_nan_in_it(backend: Served):
    bias = backend.randn(2, 1, N, N)
    bias[0, 0, 3] = -torch.inf
    bias[..., 4] = -torch.inf
    gradients = compare(lambda bias, **t: backend(**t, attn_mask=bias), backend.qkv() | {"bias": bias})
    assert not gradients["bias"][0, 0, 3].any()


@every_backend
def test_causal_and_left_padding_leave_early_rows_empty_but_finite(backend: Served):
    present = torch.ones(2, N, dtype=torch.bool, device=DEVICE)
    present[0, :4] = False
    causal = RowIntervals.causal(N, N, DEVICE)
    mask = RowIntervals(causal.start, causal.end, key_mask=present)
    keep = top_left(N, N) & present[:, None, None, :]
    for options in ({}, {"return_lse": True})[backend.is_kernel :]:
        compare(lambda options=options, **t: backend(**t, attn_mask=mask, **options), backend.qkv(), {"keep": keep})
        compare(lambda options=options, **t: backend(**t, attn_mask=keep, **options), backend.qkv(), {"keep": keep})


@across("return_lse", [False, True], quick=(1,))
def test_a_row_of_float32_minima_is_a_uniform_average(backend: Served, return_lse):
    bias = torch.zeros(2, 1, N, N, device=DEVICE)
    bias[0, 0, 2] = torch.finfo(torch.float32).min
    bias[1, 0, :, 5:] = torch.finfo(torch.float32).min
    tensors = backend.qkv()
    result = backend(**tensors, attn_mask=bias, return_lse=return_lse)
    out = result[0] if return_lse else result
    assert_close(out[0, :, 2], tensors["value"][0].double().mean(1), backend.dtype)
    if return_lse:  # at the edge of float32 it only has to stay a very small number
        assert result[1].isfinite().all()
        assert (result[1][0, :, 2] < -1e38).all() and (result[1][1] > -100).all()
    gradients = compare(lambda *, bias, **t: backend(**t, attn_mask=bias), tensors | {"bias": bias})
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@across("company", ["sinks", "softcap", "causal", "dead rows", "many keys"], quick=(0, 3, 4))
def test_finite_minima_keep_their_meaning_in_company(backend: Served, company):
    minimum = torch.finfo(torch.float32).min
    keys = 150 if company == "many keys" else N
    tensors = backend.qkv(1, 2, N, keys)
    bias = torch.zeros(N, keys, device=DEVICE)
    bias[4] = minimum
    bias[5, : keys - 3] = minimum  # sees the last three keys only
    options: dict = {}
    expected: dict = {}
    if company == "sinks":
        tensors["sinks"] = torch.tensor([0.3, -1.0], device=DEVICE)
    elif company == "softcap":
        options["softcap"] = expected["softcap"] = 2.0
    elif company == "dead rows":
        bias[7] = -torch.inf
        bias[8, :5], bias[8, 5:] = -torch.inf, minimum  # an average of five
    causal = RowIntervals.causal(N, keys, DEVICE)
    if company == "causal":
        expected["keep"] = causal.dense(keys)

    def run(bias, **t):
        mask = RowIntervals(causal.start, causal.end, None, bias) if company == "causal" else bias
        return backend(**t, attn_mask=mask, **options)

    compare(run, tensors | {"bias": bias}, expected)


@every_backend
def test_two_bfloat16_minima_added_are_a_row_without_keys(backend: Served):
    minimum = torch.finfo(torch.bfloat16).min
    one = torch.zeros(N, N, dtype=torch.bfloat16, device=DEVICE)
    one[:, 6:] = minimum
    one[3] = minimum
    both = (one + one).float()
    assert both.isinf().any()
    gradients = compare(lambda **t: backend(**t, attn_mask=both), backend.qkv(), {"bias": both.double()})
    assert not gradients["query"][:, :, 3].any()


@every_backend
def test_bfloat16_minima_in_a_wider_mask_average_the_row(backend: Served):
    bias = torch.zeros(N, N, device=DEVICE)
    bias[3] = torch.finfo(torch.bfloat16).min
    compare(lambda **t: backend(**t, attn_mask=bias), backend.qkv(), {"bias": bias.double()})


def test_a_bfloat16_mask_of_two_added_minima_stays_finite_in_bfloat16():
    minimum = torch.finfo(torch.bfloat16).min
    one = torch.zeros(N, N, dtype=torch.bfloat16)
    one[:, 6:] = minimum
    one[3] = minimum
    query, key, value = (torch.randn(2, 2, N, 64, dtype=torch.bfloat16) for _ in range(3))
    tensors = {"query": query, "key": key, "value": value}
    compare(lambda **t: ffpa_attn_func(**t, attn_mask=one + one), tensors, {"bias": (one + one).double()})
    compare(lambda **t: ffpa_attn_func(**t, attn_mask=one), tensors, {"bias": one.double()})


@every_backend
def test_a_mask_of_another_floating_dtype_raises_and_is_not_cast(backend: Served):
    wrong = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16, torch.float32: torch.bfloat16}
    mask = torch.zeros(N, N, dtype=wrong[backend.dtype], device=DEVICE)
    with pytest.raises(TypeError, match=f"attn_mask is {mask.dtype} beside {backend.dtype}"):
        ffpa_attn_func(*backend.qkv().values(), attn_mask=mask, backend=backend.name)
    with pytest.raises(TypeError, match="attn_mask is torch.float64"):
        ffpa_attn_func(*backend.qkv().values(), attn_mask=mask.double(), backend=backend.name)


@every_backend
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64])
def test_an_integer_mask_raises(backend: Served, dtype):
    with pytest.raises(TypeError, match="attn_mask must be bool .* not torch"):
        ffpa_attn_func(*backend.qkv().values(), attn_mask=torch.ones(N, N, dtype=dtype, device=DEVICE))


@every_backend
@pytest.mark.parametrize("shape", [(N, N + 1), (3, 1, N, N), (1, 3, N, N), (N - 1, N), (1, 1, 1, N, N), ()])
def test_a_mask_of_the_wrong_shape_raises(backend: Served, shape):
    with pytest.raises(ValueError, match="attn_mask has shape .* must broadcast to"):
        ffpa_attn_func(*backend.qkv().values(), attn_mask=torch.ones(shape, dtype=torch.bool, device=DEVICE))


def test_a_mask_that_is_no_tensor_raises():
    query = torch.randn(1, 1, 4, 64)
    with pytest.raises(TypeError, match="attn_mask must be None.*not list"):
        ffpa_attn_func(query, query, query, [[1, 1]])


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


# --- log-sum-exp and gradients ----------------------------------------------------------------------------------------


@every_backend
def test_the_log_sum_exp_alone_is_differentiable(backend: Served):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv().items()}
    _, lse = backend(**tensors, return_lse=True)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    seed = torch.randn(lse.shape, device=DEVICE)
    lse.backward(seed)
    truth(**exact)[1].backward(seed.double())
    for name in ("query", "key"):
        assert_close(tensors[name].grad, exact[name].grad, backend.dtype, name)
    assert tensors["value"].grad is None or not tensors["value"].grad.any()


@every_backend
def test_the_log_sum_exp_is_float32_natural_and_shaped_like_the_rows(backend: Served):
    out, lse = backend(**backend.qkv(2, 3, 5, 7), return_lse=True)
    assert lse.shape == (2, 3, 5) and lse.dtype == torch.float32 and out.shape == (2, 3, 5, 64)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in backend.qkv(2, 3, 5, 7).items()}
    assert torch.allclose(backend(**zeros, return_lse=True)[1], torch.tensor(7.0, device=DEVICE).log())


def test_the_log_sum_exp_of_float64_inputs_is_float32_too():
    query = torch.randn(1, 1, 4, 64, dtype=torch.float64)
    assert ffpa_attn_func(query, query, query, return_lse=True)[1].dtype == torch.float32
    assert ffpa_attn_func(query, query[:, :, :0], query[:, :, :0], return_lse=True)[1].dtype == torch.float32


@across(
    "alone, mask_shape",
    list(itertools.product(["query", "key", "value", "bias", "sinks"], [(1, 1, N, N), (2, 1, 1, N), (1, 2, 1, N)])),
    quick=(0, 4, 6, 9, 13),
)
def test_each_input_can_be_the_only_one_with_a_gradient(backend: Served, alone, mask_shape):
    tensors = backend.qkv() | {"bias": backend.randn(*mask_shape)}
    if alone == "sinks":
        tensors["sinks"] = backend.randn(2)
    elif mask_shape[1] == 2:
        tensors["bias"] = tensors["bias"].float()
    compare(lambda bias, **t: backend(**t, attn_mask=bias), tensors, needs=(alone,))
    for name, tensor in tensors.items():
        assert tensor.requires_grad == (name == alone)


@SDPA_ONLY
def test_gradients_pass_a_numeric_check_in_float64(backend: Served):
    query, key, value = (torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(query, key, value, bias, sinks):
        return ffpa_attn_func(query, key, value, bias, softcap=2.0, sinks=sinks)

    assert torch.autograd.gradcheck(run, (query, key, value, bias, sinks))


@every_kernel
def test_a_second_derivative_raises(backend: Served):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv().items()}
    (gradient,) = torch.autograd.grad(backend(**tensors).sum(), tensors["query"], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        gradient.sum().backward()


@every_kernel
def test_writing_into_an_input_after_forward_is_noticed(backend: Served):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv().items()}
    for name in tensors:
        out = backend(**tensors)
        with torch.no_grad():
            tensors[name].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@every_kernel
def test_saved_tensors_can_be_moved_elsewhere_and_used_twice(backend: Served):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv().items()}
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = backend(**tensors)
    assert sum(shape == (2, 2, N, 64) for shape in packed) == 4  # query, key, value and the output
    assert not any(shape[-2:] == (N, N) for shape in packed)  # and nothing quadratic
    first = torch.autograd.grad(out.sum(), tuple(tensors.values()), retain_graph=True)
    again = torch.autograd.grad(out.sum(), tuple(tensors.values()))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@every_kernel
def test_forward_mode_derivatives_raise_instead_of_vanishing(backend: Served):
    tensors = backend.qkv()
    for name in tensors:
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            dual = torch.autograd.forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))
            backend(**(tensors | {name: dual}))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda query: backend(**(tensors | {"query": query})), (tensors["query"],), (tensors["key"],))
    with torch.autograd.forward_ad.dual_level():
        assert backend(**tensors).shape == (2, 2, N, 64)  # nothing to lose here


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_backend
def test_vmap_is_a_loop(backend: Served):
    tensors = backend.qkv()
    many = backend.randn(3, 2, 2, N, 64)
    out = torch.vmap(lambda query: backend(**(tensors | {"query": query})))(many)
    for one, query in zip(out, many, strict=True):
        exact = {name: tensor.double() for name, tensor in (tensors | {"query": query}).items()}
        assert_close(one, truth(**exact)[0], backend.dtype)


@every_kernel
def test_backward_is_deterministic_bit_for_bit(backend: Served):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv(1, 2, 40, 70, kv_heads=1).items()}
    bias = backend.randn(1, 1, 40, 70).requires_grad_()
    seed = backend.randn(1, 2, 40, 64)
    inputs = (*tensors.values(), bias)
    runs = [torch.autograd.grad(backend(**tensors, attn_mask=bias, enable_gqa=True), inputs, seed) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@every_backend
def test_no_gradient_is_recorded_without_need(backend: Served):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv().items()}
    with torch.no_grad():
        assert not backend(**tensors).requires_grad
    with torch.inference_mode():
        out, lse = backend(**tensors, return_lse=True)
    assert not out.requires_grad and not lse.requires_grad
    assert_close(out, truth(**{n: t.detach().double() for n, t in tensors.items()})[0], backend.dtype)


@every_backend
def test_forward_gives_the_same_bits_with_and_without_grad(backend: Served):
    if not backend.is_kernel and DEVICE.type == "cuda":
        pytest.skip("torch picks among its own kernels by grad mode")
    tensors = backend.qkv(rows=33, keys=70)
    plain = backend(**tensors)
    tracked = backend(**{name: tensor.requires_grad_() for name, tensor in tensors.items()})
    assert torch.equal(plain, tracked)


# --- dtypes and autocast ----------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("odd", ["query", "key", "value"])
def test_mixed_dtypes_raise_without_autocast(backend: Served, odd):
    tensors = backend.qkv()
    tensors[odd] = tensors[odd].to(torch.bfloat16 if backend.dtype != torch.bfloat16 else torch.float32)
    with pytest.raises(TypeError, match="query is .*, key .*, value .*; one dtype is needed"):
        ffpa_attn_func(**tensors, backend=backend.name)


def test_integer_inputs_raise():
    query = torch.ones(1, 1, 4, 64, dtype=torch.int32)
    with pytest.raises(TypeError, match="query must be floating point, not torch.int32"):
        ffpa_attn_func(query, query, query)


AMP = torch.bfloat16


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float32, AMP), (torch.float32,) * 3, (AMP,) * 3, (torch.float16, AMP, torch.float32)],
    ids=["qk promoted", "all float32", "already cast", "three dtypes"],
)
def test_autocast_casts_query_key_and_value_as_f_sdpa_does(dtypes):
    tensors = [torch.randn(2, 2, N, 64, device=DEVICE).to(dtype).requires_grad_() for dtype in dtypes]
    copies = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    with torch.autocast(DEVICE.type, dtype=AMP):
        out = ffpa_attn_func(*tensors)
        expected = F.scaled_dot_product_attention(*copies)
    assert out.dtype == expected.dtype == AMP
    exact = [tensor.detach().to(AMP).double() for tensor in tensors]
    assert_close(out, F.scaled_dot_product_attention(*exact), AMP)
    out.sum().backward()
    expected.sum().backward()
    for tensor, copy in zip(tensors, copies, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        assert_close(tensor.grad, copy.grad.double(), AMP)


def test_autocast_leaves_float64_alone():
    query = torch.randn(1, 1, 4, 64, dtype=torch.float64, device=DEVICE)
    with torch.autocast(DEVICE.type, dtype=AMP):
        assert ffpa_attn_func(query, query, query).dtype == torch.float64


@pytest.mark.parametrize("kind", ["float32", "bool", "query's", "other half"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "plain"])
def test_which_mask_dtypes_are_taken_with_and_without_autocast(kind, autocast):
    dtype = torch.float32 if autocast else AMP
    tensors = [torch.randn(2, 2, N, 64, device=DEVICE).to(dtype) for _ in range(3)]
    keep = torch.rand(N, N, device=DEVICE) > 0.3
    keep[:, 0] = True
    masks = {
        "float32": torch.zeros(N, N, device=DEVICE).masked_fill(~keep, -1e9),
        "bool": keep,
        "query's": torch.zeros(N, N, device=DEVICE, dtype=AMP).masked_fill(~keep, -1e9),
        "other half": torch.zeros(N, N, device=DEVICE, dtype=torch.float16),
    }
    with torch.autocast(DEVICE.type, dtype=AMP, enabled=autocast):
        if kind == "other half":
            with pytest.raises(TypeError, match="attn_mask is torch.float16 beside torch.bfloat16"):
                ffpa_attn_func(*tensors, attn_mask=masks[kind])
            return
        out = ffpa_attn_func(*tensors, attn_mask=masks[kind])
    exact = [tensor.to(AMP).double() for tensor in tensors]
    assert_close(out, truth(*exact, keep=keep)[0], AMP)


def test_a_float32_mask_keeps_its_precision_under_float16_autocast():
    # -1e9 is -inf in float16, and 1000.0625 has more digits than float16 holds.
    tensors = [torch.randn(1, 1, 4, 64, device=DEVICE) for _ in range(3)]
    bias = torch.tensor([[1000.0625, 1000.5, -1e9, -1e9]], device=DEVICE).expand(4, 4).clone()
    bias[3] = -1e9
    with torch.autocast(DEVICE.type, dtype=torch.float16):
        out = ffpa_attn_func(*tensors, attn_mask=bias)
    exact = [tensor.half().double() for tensor in tensors]
    expected, _ = truth(*exact, bias=bias.float().double())
    assert_close(out[:, :, :3], expected[:, :, :3], torch.float16)
    assert out.isfinite().all() and out[:, :, 3].any()


@every_kernel
def test_autocast_reaches_kernels_cast(backend: Served):
    half = torch.float16 if DEVICE.type == "cpu" else backend.dtype
    tensors = [torch.randn(1, 2, N, 64, device=DEVICE).requires_grad_() for _ in range(3)]
    with torch.autocast(DEVICE.type, dtype=half):
        out = backend(*tensors)
    assert out.dtype == half
    exact = [tensor.detach().to(half).double() for tensor in tensors]
    assert_close(out, truth(*exact)[0], half)
    out.sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in tensors)


# --- dropout ----------------------------------------------------------------------------------------------------------


def rng_state() -> torch.Tensor:
    return torch.cuda.get_rng_state(DEVICE) if DEVICE.type == "cuda" else torch.get_rng_state()


@across("more", [{"return_lse": True}, {}])
def test_no_dropout_leaves_the_generator_alone(backend: Served, more):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv().items()}
    before = rng_state()
    result = backend(**tensors, dropout_p=0.0, **more)
    (result[0] if more else result).sum().backward()
    assert torch.equal(rng_state(), before)
    backend(**backend.qkv(), dropout_p=0.5, **more)
    assert not torch.equal(rng_state(), before)


@every_backend
def test_the_seed_decides_what_dropout_drops(backend: Served):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv(rows=20, keys=40).items()}
    seed = backend.randn(2, 2, 20, 64)

    def run():
        out = backend(**tensors, dropout_p=0.4)
        return (out, *torch.autograd.grad(out, tuple(tensors.values()), seed))

    torch.manual_seed(5)
    first, second = run(), run()
    torch.manual_seed(5)
    again = run()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])


@across("more", [{"return_lse": True}, {"softcap": 5.0}, {}])
def test_backward_drops_what_forward_dropped(backend: Served, more):
    # With the identity as value the output is the dropped matrix of probabilities itself.
    query, key = backend.randn(2, 2, 48, 64), backend.randn(2, 2, 64, 64)
    value = torch.eye(64, dtype=backend.dtype, device=DEVICE).expand(2, 2, 64, 64).clone()
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    result = backend(*inputs, dropout_p=0.3, **more)
    out, lse = result if isinstance(result, tuple) else (result, None)
    drop = (out.detach() != 0).double() / 0.7
    assert 0.6 < (out != 0).double().mean() < 0.8
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected, expected_lse = truth(*exact, drop=drop, softcap=more.get("softcap"))
    assert_close(out, expected, backend.dtype)
    if lse is not None:  # dropout comes after the softmax
        assert_close(lse, expected_lse, backend.dtype, "lse")
    seed = backend.randn(*out.shape)
    found = torch.autograd.grad(out, inputs, seed)
    wanted = torch.autograd.grad(expected, exact, seed.double())
    for name, gradient, exact_gradient in zip(("query", "key", "value"), found, wanted, strict=True):
        assert_close(gradient, exact_gradient, backend.dtype, name)


@every_backend
def test_a_checkpoint_recomputes_the_same_dropout(backend: Served):
    tensors = [tensor.requires_grad_() for tensor in backend.qkv(rows=20, keys=30).values()]

    def run(query, key, value):
        return backend(query, key, value, dropout_p=0.5)

    torch.manual_seed(3)
    plain = run(*tensors)
    expected = torch.autograd.grad(plain.sum(), tensors)
    torch.manual_seed(3)
    out = checkpoint(run, *tensors, use_reentrant=False)
    assert torch.equal(out, plain)
    for gradient, wanted in zip(torch.autograd.grad(out.sum(), tensors), expected, strict=True):
        assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5, math.nan])
def test_an_impossible_dropout_raises(dropout_p):
    query = torch.randn(1, 1, 4, 64)
    with pytest.raises(ValueError, match="dropout_p="):
        ffpa_attn_func(query, query, query, dropout_p=dropout_p)


# --- empty calls ------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize(
    "batch, heads, rows, keys",
    [(0, 2, 5, 7), (2, 0, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (0, 0, 0, 0), (2, 2, 0, 0)],
)
@pytest.mark.parametrize("mask", [None, "bool", "float", "causal", "intervals"])
def test_empty_tensors_give_empty_or_zero_results_and_gradients(backend: Served, batch, heads, rows, keys, mask):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv(batch, heads, rows, keys).items()}
    attn_mask = {
        "bool": torch.ones(rows, keys, dtype=torch.bool, device=DEVICE),
        "float": torch.zeros(rows, keys, dtype=backend.dtype, device=DEVICE, requires_grad=True),
        "intervals": RowIntervals.full(rows, keys, DEVICE),
    }.get(mask)
    out, lse = backend(**tensors, attn_mask=attn_mask, is_causal=mask == "causal", return_lse=True)
    assert out.shape == (batch, heads, rows, 64) and out.dtype == backend.dtype
    assert lse.shape == (batch, heads, rows) and (lse == -torch.inf).all() and not out.any()
    out.sum().backward()
    for tensor in tensors.values():
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape and not tensor.grad.any()
    out = backend(**tensors, attn_mask=attn_mask, is_causal=mask == "causal")
    assert out.shape == (batch, heads, rows, 64) and not out.any()


@every_backend
def test_no_keys_but_sinks_leave_the_sink_as_log_sum_exp(backend: Served):
    sinks = torch.tensor([0.5, -1.0], device=DEVICE, requires_grad=True)
    out, lse = backend(**backend.qkv(2, 2, 3, 0), sinks=sinks, return_lse=True)
    assert not out.any() and torch.equal(lse, sinks.detach()[None, :, None].expand(2, 2, 3))
    lse.sum().backward()
    assert torch.equal(sinks.grad, torch.full((2,), 6.0, device=DEVICE))


# --- memory layout ----------------------------------------------------------------------------------------------------


def _transposed(shape, make):
    batch, heads, length, width = shape
    return make(batch, length, heads, width).transpose(1, 2)


def _fused_chunk(shape, make):
    batch, heads, length, width = shape
    return make(batch, length, 3, heads, width)[:, :, 1].transpose(1, 2)


def _sliced(shape, make):
    batch, heads, length, width = shape
    return make(batch, heads, length + 3, width + 8)[:, :, 2:-1, :width]


def _last_dim_strided(shape, make):
    return make(*shape[:3], 2 * shape[3])[..., ::2]


def _width_first(shape, make):
    batch, heads, length, width = shape
    return make(batch, heads, width, length).transpose(2, 3)


def _expanded(shape, make):
    batch, heads, length, width = shape
    return make(1, 1, length, width).expand(batch, heads, length, width)


def _rows_expanded(shape, make):
    return make(*shape[:2], 1, shape[3]).expand(shape)


def _offset_by_one(shape, make):
    return make(math.prod(shape) + 1)[1:].view(shape)


def _padded_by_one(shape, make):
    return make(*shape[:3], shape[3] + 1)[..., :-1]


LAYOUTS = {
    f.__name__.strip("_"): f
    for f in (
        _transposed, _fused_chunk, _sliced, _last_dim_strided, _width_first, _expanded, _rows_expanded, _offset_by_one,
        _padded_by_one,
    )
}  # fmt: skip


@across("layout", list(LAYOUTS), quick=(1, 5, 7))
def test_any_layout_gives_the_same_numbers_and_gradients(backend: Served, layout):
    make = LAYOUTS[layout]
    shape = (2, 2, 12, 64)
    tensors = {}
    for name in ("query", "key", "value"):
        leaves = []

        def leaf(*size, leaves=leaves):
            leaves.append(backend.randn(*size).requires_grad_())
            return leaves[-1]

        tensors[name] = make(shape, leaf)
        assert tensors[name].shape == shape
    compare(lambda **t: backend(**t, is_causal=True, return_lse=True), tensors, {"keep": top_left(12, 12)})
    if backend.is_kernel:
        return
    compare(lambda **t: backend(**t), tensors)
    keep = torch.rand(12, 12, device=DEVICE) > 0.3
    keep[:, 0] = True
    compare(lambda **t: backend(**t, attn_mask=keep), tensors, {"keep": keep})


@across("layout, kind", list(itertools.product(LAYOUTS, ["bool", "bias"])), quick=(4, 7, 8, 11, 13, 14))
def test_masks_of_any_layout_give_the_same_numbers(backend: Served, layout, kind):
    def source(*size):
        values = backend.randn(*size)
        return values > -0.5 if kind == "bool" else values

    mask = LAYOUTS[layout]((2, 2, 16, 16), source)
    expected = {"keep": mask} if kind == "bool" else {"bias": mask.double()}
    compare(lambda **t: backend(**t, attn_mask=mask), backend.qkv(rows=16, keys=16), expected)


@across("layout", ["stride 0", "transposed", "sliced", "offset by one", "last dim strided"], quick=(0, 3))
def test_an_incoming_gradient_of_any_layout_is_read_right(backend: Served, layout):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv(rows=12, keys=12).items()}
    shape = (2, 2, 12, 64)
    seed = {
        "stride 0": lambda: backend.randn(1, 1, 1, 1).expand(shape),
        "transposed": lambda: _transposed(shape, backend.randn),
        "sliced": lambda: _sliced(shape, backend.randn),
        "offset by one": lambda: _offset_by_one(shape, backend.randn),
        "last dim strided": lambda: _last_dim_strided(shape, backend.randn),
    }[layout]()
    found = torch.autograd.grad(backend(**tensors), tuple(tensors.values()), seed)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    wanted = torch.autograd.grad(truth(**exact)[0], tuple(exact.values()), seed.double())
    for name, gradient, expected in zip(tensors, found, wanted, strict=True):
        assert_close(gradient, expected, backend.dtype, name)


@every_backend
@pytest.mark.parametrize("lies", ["stride 0", "sliced"])
def test_small_tensors_of_any_layout_are_read_right(backend: Served, lies):
    def strided(tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers, every other one of a wider tensor."""
        return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]

    if lies == "stride 0":
        sinks = backend.randn(1, dtype=torch.float32).expand(2)
        start = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE).expand(2, N)
        end = torch.full((1, 1), 7, dtype=torch.int32, device=DEVICE).expand(2, N)
        present = torch.ones(1, 1, dtype=torch.bool, device=DEVICE).expand(2, N)
    else:
        sinks = strided(backend.randn(2, dtype=torch.float32))
        window = RowIntervals.sliding_window(N, N, 4, DEVICE)
        start, end = strided(window.start), strided(window.end)
        present = strided(torch.rand(2, N, device=DEVICE) > 0.3)
    mask = RowIntervals(start, end, present)
    tensors = backend.qkv() | {"sinks": sinks.detach()}
    assert tensors["sinks"].stride() == sinks.stride()
    compare(lambda **t: backend(**t, attn_mask=mask, return_lse=True), tensors, {"keep": mask.dense(N)})
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    _, lse = backend(**tensors, attn_mask=mask, return_lse=True)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    expected = truth(**exact, keep=mask.dense(N))[1]
    seed = torch.ones(1, 1, 1, device=DEVICE).expand(2, 2, N) if lies == "stride 0" else strided(torch.randn_like(lse))
    lse.backward(seed)
    expected.backward(seed.double())
    for name in ("query", "key", "sinks"):
        assert_close(tensors[name].grad, exact[name].grad, backend.dtype, name)


@every_backend
def test_sum_backward_gives_the_right_gradients(backend: Served):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv().items()}
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    backend(**tensors).sum().backward()
    truth(**exact)[0].sum().backward()
    # The gradients of query and key cancel to nearly nothing here, so the rounding of the larger parts decides.
    for name in tensors:
        error = (tensors[name].grad.double() - exact[name].grad).abs().max().item()
        assert error <= 8 * TOLERANCE[backend.dtype] * max(1.0, exact[name].grad.abs().max().item()), name


@every_kernel
def test_the_output_takes_the_memory_order_of_query(backend: Served):
    tensors = {name: _transposed((2, 2, 12, 64), backend.randn) for name in ("query", "key", "value")}
    out = backend(**tensors)
    assert out.stride() == tensors["query"].stride()
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()
    assert backend(**backend.qkv()).is_contiguous()


@every_backend
def test_inputs_are_left_as_they_were(backend: Served):
    tensors = backend.qkv() | {"attn_mask": backend.randn(N, N)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    out = backend(**tensors)
    out.zero_()
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


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


# --- the composite ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, "causal", "bool", "bias", "intervals"])
def test_long_calls_computed_in_chunks_give_the_same(mask, monkeypatch):
    backend = Served("sdpa", torch.float32)
    tensors = backend.qkv(2, 4, 23, 17, kv_heads=2) | {"sinks": torch.randn(4, device=DEVICE)}
    options: dict = {"softcap": 3.0, "return_lse": True, "enable_gqa": True}
    expected: dict = {"softcap": 3.0}
    if mask == "causal":
        options["is_causal"], expected["keep"] = True, top_left(23, 17)
    elif mask == "bool":
        options["attn_mask"] = expected["keep"] = torch.rand(2, 1, 23, 17, device=DEVICE) > 0.5
    elif mask == "bias":
        tensors["bias"] = torch.randn(1, 4, 23, 17, device=DEVICE)
    elif mask == "intervals":
        options["attn_mask"] = RowIntervals.sliding_window(23, 17, 5, DEVICE)
        expected["keep"] = options["attn_mask"].dense(17)
    monkeypatch.setattr(sdpa_run, "_CHUNK_ELEMENTS", 2 * 4 * 17 * 5)  # five rows at a time, the last piece three

    def run(bias=None, **t):
        return backend(**t, **(options if bias is None else options | {"attn_mask": bias}))

    compare(run, tensors, expected)


def test_dropout_in_chunks_drops_the_same_in_backward(monkeypatch):
    monkeypatch.setattr(sdpa_run, "_CHUNK_ELEMENTS", 2 * 2 * 64 * 10)
    test_backward_drops_what_forward_dropped(Served("sdpa", torch.float32), {"softcap": 5.0})


def test_reentrant_checkpointing_with_a_bias_draws_the_same_dropout_twice():
    query, key, value = (torch.randn(1, 1, 12, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    bias = torch.zeros(12, 12, device=DEVICE)

    def run(query, key, value):
        return ffpa_attn_func(query, key, value, attn_mask=bias, dropout_p=0.5, backend="sdpa")

    out = checkpoint(run, query, key, value, use_reentrant=True)
    (out**2).sum().backward()
    # out is linear in value: <gradient, value> is 2 |out|^2 only where both passes dropped the same weights.
    assert torch.isclose((value.grad * value).sum(), 2 * (out**2).sum(), rtol=1e-4)


def test_missing_leading_dimensions_broadcast_as_in_sdpa():
    query = torch.randn(2, 3, 8, 16, device=DEVICE)
    key = torch.randn(3, 8, 16, device=DEVICE)
    torch.testing.assert_close(ffpa_attn_func(query, key, key), F.scaled_dot_product_attention(query, key, key))
