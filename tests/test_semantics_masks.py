"""What a mask means, the same for every backend: kept and added keys, dead rows, minima; and the plain-torch route."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import BACKENDS, DEVICE, Served, across, assert_close, compare

from ffpa_hf import RowIntervals, ffpa_attn_func
from ffpa_hf.kernels.sdpa import run as sdpa_run

every_backend = pytest.mark.parametrize("backend", BACKENDS)


def top_left(rows: int, keys: int) -> torch.Tensor:
    return torch.arange(keys, device=DEVICE) <= torch.arange(rows, device=DEVICE)[:, None]


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
