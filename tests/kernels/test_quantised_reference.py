"""The definition of quantised attention: number formats by brute force, codes and scales by hand, errors by size."""

from __future__ import annotations

import math

import pytest
import torch

from ffpa_hf.kernels import quantised_reference as quantised
from ffpa_hf.kernels.reference import attention

INF, NAN = math.inf, math.nan


def error(given: torch.Tensor, exact: torch.Tensor) -> float:
    return float((given - exact).norm() / exact.norm())


def normal(seed: int, q_len: int = 256, kv_len: int = 256, head_dim: int = 64, heads: int = 2, kv_heads: int = 2):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, heads, q_len, head_dim), *[(1, kv_heads, kv_len, head_dim)] * 2)
    return tuple(torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes)


def both(q, k, v, precision="fp8", smooth_k=True, smooth_v=False, scale=None, **masks):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = quantised.quantised_attention(
        q, k, v, scale=scale, precision=precision, smooth_k=smooth_k, smooth_v=smooth_v, **masks
    )
    exact, exact_lse = attention(q.double(), k.double(), v.double(), scale=scale, **masks)
    return out, lse, exact, exact_lse


# --- number formats ---------------------------------------------------------------------------------------------------


def nearest(x: float, numbers: list[float]) -> int:
    """Index of the nearest number, of the even index where two are as near; saturating."""
    return min(range(len(numbers)), key=lambda index: (abs(numbers[index] - x), index % 2))


@pytest.mark.parametrize(
    "to_code, values, top",
    [
        (quantised.e4m3_code, quantised.e4m3_value(torch.arange(127, dtype=torch.uint8)).tolist(), 448.0),
        (quantised.e2m1_code, list(quantised.E2M1_VALUES), 6.0),
    ],
    ids=["e4m3", "e2m1"],
)
def test_rounding_is_to_the_nearest_and_ties_to_even(to_code, values, top):
    halfway = torch.tensor([(low + high) / 2 for low, high in zip(values, values[1:], strict=False)])
    beside = [torch.nextafter(halfway, torch.tensor(to)).tolist() for to in (INF, 0.0)]
    tried = values + halfway.tolist() + beside[0] + beside[1] + [top * 1.2, top * 100]
    expected = [nearest(x, values) for x in tried]
    assert to_code(torch.tensor(tried)).tolist() == expected
    sign = 128 if len(values) > 8 else 8
    assert to_code(-torch.tensor(tried)).tolist() == [code + sign for code in expected]


def test_the_formats_saturate_and_keep_nan_where_they_can():
    given = torch.tensor([INF, -INF, NAN, -NAN, 449.0, 1e38, -0.0])
    assert quantised.e4m3_code(given).tolist() == [0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0x7E, 0x80]
    assert quantised.e2m1_code(given).tolist() == [7, 15, 7, 7, 7, 7, 8]
    every = torch.arange(256, dtype=torch.uint8)
    kept = every[(every & 0x7F) != 0x7F]
    assert torch.equal(quantised.e4m3_code(quantised.e4m3_value(kept)), kept)
    nibbles = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(quantised.e2m1_code(quantised.e2m1_value(nibbles)), nibbles)


# --- means, scales, codes ---------------------------------------------------------------------------------------------


def test_the_token_mean_is_summed_in_the_stated_order():
    x = torch.randn(1, 1, 300, 3, generator=torch.Generator().manual_seed(1)) * 100

    def in_order(rows):
        strands = [torch.zeros(3) for _ in range(8)]
        for index, row in enumerate(rows):
            strands[index % 8] += row
        total = strands[0].clone()
        for strand in strands[1:]:
            total += strand
        return total

    tokens = x[0, 0]
    chunks = [in_order(tokens[:128]), in_order(tokens[128:256]), in_order(tokens[256:])]
    assert torch.equal(quantised.token_mean(x)[0, 0], in_order(chunks) / 300)
    backwards = in_order(list(tokens.flip(0))) / 300
    assert not torch.equal(quantised.token_mean(x)[0, 0], backwards)  # the order shows


def test_a_scale_is_the_largest_magnitude_over_the_largest_code():
    q, k, v = normal(2, q_len=70, kv_len=130)
    found = quantised.quantise_fp8(q, k, v, smooth_k=False)
    assert torch.equal(found.query_scale, q.float().abs().amax(-1) / 448)
    assert found.key_scale.shape == (1, 2, 3)
    assert torch.equal(found.key_scale[..., 2], k[:, :, 128:].float().abs().amax((-2, -1)) / 448)
    assert torch.equal(found.value_scale, v.float().abs().amax(-2) / 448)
    for given, back in zip((q, k, v), found.dequantised(torch.float32), strict=True):
        assert (given.float() - back).abs().max() <= 0.0358 * given.float().abs().max()  # half of the step at 448
    for codes in (found.query, found.key, found.value):
        assert codes.dtype == torch.uint8
        assert quantised.e4m3_value(codes).abs().max() == 448.0


def test_nvfp4_scales_cover_sixteen_neighbours():
    q, k, v = normal(3, q_len=20, kv_len=70)
    found = quantised.quantise_fp4(q, k, v)
    assert found.query_group.shape == (1, 2, 20, 4) and found.key_group.shape == (1, 2, 70, 4)
    assert found.value_group.shape == (1, 2, 5, 64)
    assert quantised.e4m3_value(found.query_group).max() == 448.0
    q_back, k_back, v_back = found.dequantised(torch.float32)
    group = q.float().unflatten(-1, (4, 16)).abs().amax(-1, keepdim=True)
    step = (q.float() - q_back).unflatten(-1, (4, 16)).abs() / group
    assert step.max() <= 1 / 6 * 1.07  # half of the widest step, 4 to 6, and the rounding of the group's scale
    smooth = k.float() - found.key_mean[:, :, None]
    assert error(k_back, smooth) < 0.1 and error(v_back, v.float()) < 0.1 and error(q_back, q.float()) < 0.1


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_codes_do_not_change_with_what_they_are_a_part_of(precision):
    """Batch, heads and padding are no part of the definition."""
    q, k, v = normal(4, q_len=33, kv_len=128)
    quantise = getattr(quantised, f"quantise_{precision}")
    whole = quantise(q, k, v)
    part = quantise(q[:, 1:, :20], k[:, 1:], v[:, 1:])
    assert torch.equal(whole.query[:, 1:, :20], part.query)
    for name in ("key", "key_scale", "key_mean", "value", "value_scale"):
        assert torch.equal(getattr(whole, name)[:, 1:], getattr(part, name))


def test_values_are_ordered_as_the_tensor_core_holds_scores():
    order = quantised.value_order().tolist()
    assert sorted(order) == list(range(16))
    for t in range(4):
        assert order[4 * t : 4 * t + 4] == [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9]


# --- attention --------------------------------------------------------------------------------------------------------

LIMITS = {"fp8": 0.056, "fp4": 0.20}


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
@pytest.mark.parametrize("masks", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_the_error_on_normal_inputs_is_that_of_the_format(precision, masks):
    out, lse, exact, exact_lse = both(*normal(5, 512, 512, 128), precision, **masks)
    assert LIMITS[precision] / 1.4 < error(out, exact) < LIMITS[precision]
    cosine = torch.nn.functional.cosine_similarity(out.flatten(), exact.flatten(), dim=0)
    assert cosine > (0.998 if precision == "fp8" else 0.97)
    assert (lse - exact_lse).abs().max() < (0.2 if precision == "fp8" else 0.9)


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_smoothing_takes_a_channel_of_large_mean_away(precision):
    q, k, v = normal(6, 512, 512, 128)
    plain = error(*both(q, k, v, precision)[::2])
    k = k.clone()
    k[..., 3] += 50
    out, lse, exact, exact_lse = both(q, k, v, precision)
    assert error(out, exact) < 1.05 * plain
    assert (lse - exact_lse).abs().max() < 1.0  # of scores that reach 20
    rough = both(q, k, v, precision, smooth_k=False)[0]
    assert error(rough, exact) > 1.8 * plain


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_smoothing_values_helps_where_they_have_a_mean(precision):
    q, k, v = normal(7, 512, 512)
    v = v + 3.0
    exact = both(q, k, v)[2]
    plain, smooth = (both(q, k, v, precision, smooth_v=on)[0] for on in (False, True))
    assert error(smooth, exact) < 0.7 * error(plain, exact)


def test_heavy_tails_stay_near_the_format():
    """Student's t with three degrees of freedom in every channel, means as large as the spread: like trained keys."""
    generator = torch.Generator().manual_seed(8)

    def tailed(mean: float) -> torch.Tensor:
        x, square = (torch.randn(1, 2, 512, 128, generator=generator) for _ in range(2))
        spread = (square.square() + torch.randn(1, 2, 512, 128, generator=generator).square()) / 2 + 0.3
        return (x / spread.sqrt() + mean * torch.randn(1, 2, 1, 128, generator=generator)).to(torch.bfloat16)

    q, k, v = tailed(1.0), tailed(2.0), tailed(0.0)
    out, _, exact, _ = both(q * 0.5, k, v)
    assert error(out, exact) < 0.09


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_masks_mean_what_they_mean_elsewhere(precision):
    q, k, v = normal(9, 40, 100, heads=4, kv_heads=2)
    generator = torch.Generator().manual_seed(9)
    mask = torch.rand(1, 4, 40, 100, generator=generator) < 0.6
    mask[:, :, 5] = False
    bias = torch.randn(1, 1, 40, 100, generator=generator).masked_fill(~mask[:, :1], -INF)
    start = torch.arange(40, dtype=torch.int32)[None]
    ranges = {"row_start": start, "row_end": torch.where(start == 7, 0, start + 30)}
    ranges["key_mask"] = torch.rand(1, 100, generator=generator) < 0.8
    for masks in ({"mask": mask}, {"bias": bias}, ranges):
        out, lse, exact, exact_lse = both(q, k, v, precision, **masks)
        assert torch.equal(lse == -INF, exact_lse == -INF)
        dead = exact_lse == -INF
        assert dead.any() and not out[dead].any() and out.isfinite().all()
        assert error(out, exact) < 1.3 * LIMITS[precision]


def test_rows_of_finite_minima_are_an_average():
    q, k, v = normal(10, 8, 64)
    bias = torch.full((1, 1, 8, 64), torch.finfo(torch.float32).min)
    out, _, _, _ = both(q, k, v, bias=bias)
    average = quantised.quantise_fp8(q, k, v).dequantised()[2].mean(-2, keepdim=True).expand_as(out)
    assert torch.allclose(out, average, atol=1e-6)


@pytest.mark.parametrize("scale, limit", [(0.0, 0.045), (-0.2, 0.075), (1.5, 0.15)])
def test_any_softmax_scale(scale, limit):
    """The error of a score grows with the score: a softmax near one-hot shows it most."""
    out, lse, exact, exact_lse = both(*normal(11, 64, 96, 64), scale=scale)
    assert error(out, exact) < limit
    assert (lse - exact_lse).abs().max() < 0.05 * max(1.0, float(exact_lse.abs().max()))


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_what_is_not_finite_never_spreads_beyond_what_attention_spreads(precision):
    q, k, v = normal(12, 64, 128)
    hidden = torch.ones(1, 1, 64, 128, dtype=torch.bool)
    hidden[..., 90:] = False
    clean = both(q, k, v, precision, mask=hidden)
    for poison in (NAN, INF, -INF):  # padding may hold anything in the keys
        other = k.clone()
        other[:, :, 100:, ::3] = poison
        out, lse, exact, _ = both(q, other, v, precision, mask=hidden)
        assert exact.isfinite().all() and out.isfinite().all() and lse.isfinite().all()
        assert error(out, clean[2]) < 1.4 * LIMITS[precision]
    infinite = v.clone()
    infinite[:, :, 3, 5] = INF
    out = both(q, k, infinite, precision)[0]
    assert out.isfinite().all()
    wrong = q.clone()
    wrong[:, :, 3, 5] = NAN
    out = both(wrong, k, v, precision)[0]
    assert out[:, :, 3].isnan().all() and out[:, :, 4:].isfinite().all()


def test_the_largest_and_the_smallest_numbers_of_bfloat16():
    q, k, v = normal(13, 16, 64)
    out = both(q, k, (v.float() * 2.0**120).to(v.dtype))[0]
    assert torch.allclose(out / 2.0**120, both(q, k, v)[0], rtol=1e-6, atol=1e-9)
    tiny = torch.full_like(k, 1e-38)
    found = quantised.quantise_fp8(q * 0, tiny, v * 0, smooth_k=False)
    assert found.query_scale.min() > 0 and found.value_scale.min() > 0
    assert not any((codes & 0x7F).any() for codes in (found.query, found.key, found.value))
    assert both(q * 0, tiny, v)[0].isfinite().all()


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="precision='fp6'"):
        both(*normal(14, 4, 4), precision="fp6")
