"""Split-KV decode against the float64 definition: every feature, and the backward after it where it reads more.

As in test_triton, memory that nobody wrote is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from test_triton import (  # noqa: E402, F401
    DTYPE,
    ON_GPU,
    TOLERANCE,
    check,
    close,
    definition,
    make,
    nan_memory,
    with_intervals,
)

from ffpa_hf.backends import TritonBackend  # noqa: E402
from ffpa_hf.kernels import triton  # noqa: E402
from ffpa_hf.kernels.common import AttentionInputs  # noqa: E402
from ffpa_hf.kernels.philox import philox_keep_mask  # noqa: E402
from ffpa_hf.kernels.triton import configs, launch  # noqa: E402
from ffpa_hf.masks import RowIntervals  # noqa: E402


@pytest.fixture(params=[1, 3])
def splits(request, monkeypatch):
    """The keys of `few` divided over one program, whose result is final, or three that are combined."""
    return divide(monkeypatch, request.param)


def divide(monkeypatch, number):
    monkeypatch.setattr(configs, "decode_splits", lambda *_: number)
    monkeypatch.setattr(launch, "_repeated", {})
    return number


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Names of the kernels that ran; every call here must be served by the decode kernels."""
    seen = []

    class Watched:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(launch, name)

        def __getitem__(self, grid):
            def start(*args, **kwargs):  # gives no compiled kernel, so that none is kept and started past us
                seen.append(self.name)
                self.kernel[grid](*args, **kwargs)

            return start

    for name in ("attention_forward", "forward_scores", "decode_split", "decode_combine"):
        monkeypatch.setattr(launch, name, Watched(name))
    yield seen
    assert not {"attention_forward", "forward_scores"} & set(seen)


def right(inputs, *, lse_rows=slice(None)):
    """The forward alone against the definition; returns out and lse."""
    out, lse, _ = triton.forward(inputs, TritonBackend())
    assert out.stride() == torch.empty_like(inputs.query).stride()
    want_out, want_lse, _ = definition(inputs, torch.zeros_like(out), None)
    close("out", out, want_out, TOLERANCE[inputs.query.dtype])
    dead = want_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, dead)
    assert not out.cpu().masked_select(dead[..., None]).any(), "a row without keys is not zero"
    finite = lse.cpu().masked_fill(dead, 0.0)[:, :, lse_rows], want_lse.masked_fill(dead, 0.0)[:, :, lse_rows]
    close("lse", *finite, TOLERANCE[inputs.query.dtype])
    return out, lse


def few(device, **fields):
    """A call of 5 rows against 200 keys, 2 query heads for each of 2 key heads, in a batch of 2."""
    return make(device, **({"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 5, "kv_len": 200} | fields))


@pytest.mark.parametrize("q_len", range(1, 8))
def test_every_number_of_rows(device, q_len, splits, launches):
    right(few(device, q_len=q_len))
    assert launches == ["decode_split"] + ["decode_combine"] * (splits > 1)


@pytest.mark.parametrize("head_dim", [64, 72, 96, 256, 320, 512, 640, 1024])
def test_every_kind_of_head_dim(device, head_dim, monkeypatch):
    divide(monkeypatch, 2)
    right(few(device, head_dim=head_dim, batch=1, kv_len=100))


def test_more_splits_than_are_summed_at_once_and_than_there_are_blocks(device, monkeypatch):
    divide(monkeypatch, 2 * launch._COMBINE_SPLITS + 5)
    right(few(device, batch=1, kv_len=1000))
    right(few(device, batch=1, kv_len=64 * 2 * launch._COMBINE_SPLITS + 700, kv_heads=1, heads=1, q_len=1))


@pytest.mark.parametrize("kv_len", [1, 3, 63, 64, 65, 128, 193])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_that_fit_no_block(device, kv_len, is_causal, splits):
    right(few(device, kv_len=kv_len, is_causal=is_causal))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (8, 1), (8, 2), (40, 2)])
def test_groups_fill_one_tile_or_several(device, heads, splits):
    right(few(device, batch=1, heads=heads[0], kv_heads=heads[1], q_len=7, is_causal=True))
    right(few(device, batch=1, heads=heads[0], kv_heads=heads[1], q_len=7))


@pytest.mark.parametrize("dtype", [torch.float16] + ([torch.bfloat16] if ON_GPU else []))
def test_half_precision(device, dtype, splits):
    right(few(device, dtype=dtype, head_dim=320))


@pytest.mark.parametrize("shape", [(2, 4, 5, 200), (2, 1, 5, 200), (1, 4, 5, 200), (2, 1, 1, 200), (1, 4, 5, 1)])
def test_masks_of_every_broadcast_shape(device, shape, splits):
    mask = torch.rand(shape, device=device) > 0.4
    bias = torch.randn(shape, device=device)
    if shape[2] > 1:
        mask[0, 0, 1] = False  # a row without keys
        bias[0, 0, 2] = float("-inf")
    mask[..., 40:140] = mask[..., 40:140] & (shape[3] == 1)  # a split that sees nothing
    right(few(device, mask=mask))
    right(few(device, bias=bias))


def test_the_backward_reads_what_decoding_left(device, splits):
    check(few(device, batch=1, is_causal=True, sinks=torch.randn(4, device=device)), grad_lse=True)
    check(few(device, batch=1, bias=torch.randn(1, 4, 1, 200, device=device)), grad_lse=True)
    check(with_intervals(few(device), _intervals(device, "holes")), grad_lse=True)


def test_a_bias_in_the_inputs_dtype(device, splits):
    right(few(device, dtype=torch.float16, bias=torch.randn(1, 4, 1, 200, device=device).half()))


def test_infinite_and_finite_minima(device, splits):
    bias = torch.zeros(2, 1, 5, 200, device=device)
    lowest = torch.finfo(torch.float32).min
    bias[0, 0, 0] = float("-inf")  # a row without keys
    bias[0, 0, 1] = lowest  # the average of all values
    bias[0, 0, 2, :100] = lowest
    bias[1, 0, 3, 5:] = float("-inf")
    bias[1, 0, 3, :5] = lowest  # the average of five
    inputs = few(device, bias=bias)
    out, _ = right(inputs, lse_rows=slice(4, None))
    assert torch.allclose(out[0, 0, 1].double(), inputs.value[0, 0].double().mean(0), atol=1e-2)


def _intervals(device, kind):
    """For 5 rows and 200 keys; batches of two differ where the kind says so."""
    rows = torch.arange(5, dtype=torch.int32, device=device)[None]
    there = torch.ones(2, 200, dtype=torch.bool, device=device)
    there[0, :150] = False
    there[1, 60:70] = False
    return {
        "lower right": RowIntervals.causal_lower_right(5, 200, device),
        "window": RowIntervals.sliding_window(5, 200, 30, device, lower_right=True),
        "short cache": RowIntervals(rows * 0, rows * 0 + 17),
        "holes": RowIntervals(rows * 0, rows + 196, there),
        "per batch": RowIntervals(torch.cat([rows * 0, rows + 90]), torch.cat([rows + 1, rows + 130])),
        "apart": RowIntervals(rows * 40, rows * 40 + 3),
        "some rows see nothing": RowIntervals(rows * 0 + 100, 100 + 50 * (rows % 2)),
        "nothing": RowIntervals(rows + 3, rows + 3),
        "out of range": RowIntervals(rows - 9, rows + 900),
    }[kind]


INTERVALS = (
    "lower right", "window", "short cache", "holes", "per batch", "apart", "some rows see nothing", "nothing",
    "out of range",
)  # fmt: skip


@pytest.mark.parametrize("kind", INTERVALS)
def test_row_intervals(device, kind, splits):
    right(with_intervals(few(device), _intervals(device, kind)))


def test_a_window_is_divided_over_all_splits_and_nothing_else_is_read(device, monkeypatch):
    """Keys outside the window's blocks may hold anything, and no split is without work."""
    divide(monkeypatch, 4)
    inputs = few(device, kv_len=2048)
    rows = torch.arange(5, dtype=torch.int32, device=device)[None]
    inputs = with_intervals(inputs, RowIntervals(rows * 0 + 1024, rows * 0 + 1280))
    key, value = inputs.key.clone(), inputs.value.clone()
    for poisoned in (key, value):
        poisoned[:, :, :1024] = float("nan")
        poisoned[:, :, 1280:] = float("nan")
    sums = []
    combine = launch.decode_combine

    class Watched:
        def __getitem__(self, grid):
            def launch_combine(partial, partial_stats, *args, **kwargs):
                sums.append(partial_stats[1].clone())
                combine[grid](partial, partial_stats, *args, **kwargs)

            return launch_combine

    monkeypatch.setattr(launch, "decode_combine", Watched())
    clean = triton.forward(inputs, TritonBackend())[0]
    assert torch.equal(clean, triton.forward(replace(inputs, key=key, value=value), TritonBackend())[0])
    assert len(sums) == 2 and sums[0].shape[0] == 4 and (sums[0] > 0).all()


def test_softcap(device, splits):
    right(few(device, softcap=0.5))
    right(few(device, softcap=3.0, bias=torch.randn(1, 4, 5, 200, device=device)))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(device, scale, splits):
    right(few(device, scale=scale))


def test_a_sink_is_counted_once(device, splits):
    sinks = torch.tensor([0.7, float("-inf"), 5.0, -2.0], device=device)
    right(few(device, sinks=sinks))
    mask = torch.rand(1, 1, 5, 200, device=device) > 0.5
    mask[:, :, 4] = False  # the sink alone
    right(few(device, sinks=sinks, mask=mask))
    right(few(device, sinks=sinks, bias=torch.randn(1, 1, 1, 200, device=device)))
    right(with_intervals(few(device, sinks=sinks), _intervals(device, "nothing")))


def test_dropout_forward_and_backward(device, splits):
    rng_state = torch.tensor([2**41 + 12345, 2**33 + 7], device=device)
    check(few(device, batch=1, dropout_p=0.3, rng_state=rng_state), grad_lse=True)
    out, *_ = triton.forward(few(device, dropout_p=1.0, rng_state=rng_state), TritonBackend())
    assert not out.any()


@pytest.mark.parametrize("dropout_p", [0.1, 0.9])
def test_it_drops_what_the_definition_says(device, dropout_p, splits):
    """With equal scores and V = identity the output is the keep mask of every head in the packed tile."""
    rng_state = torch.tensor([-(2**50) - 3, 2**40 + 9], device=device)
    inputs = few(device, kv_len=64, dropout_p=dropout_p, rng_state=rng_state, scale=0.0)
    eye = torch.eye(64, device=device, dtype=DTYPE).expand(2, 2, 64, 64)
    out, *_ = triton.forward(replace(inputs, value=eye), TritonBackend())
    assert torch.equal(out > 0, philox_keep_mask(rng_state, 2, 4, 5, 64, dropout_p))


def _strided(device, layout):
    def seen(*shape):
        return torch.randn(shape, device=device).to(DTYPE)

    if layout == "transposed":
        return (
            seen(2, 5, 4, 64).transpose(1, 2),
            seen(2, 200, 2, 64).transpose(1, 2),
            seen(2, 200, 2, 64).transpose(1, 2),
        )
    if layout == "fused":
        parts = seen(2, 5, 8, 64).split([4, 2, 2], 2)
        return tuple(part.transpose(1, 2) for part in parts)
    if layout == "slice of a cache":
        cache = seen(2, 2, 2, 512, 64)
        return seen(2, 4, 5, 64), cache[0, :, :, :200], cache[1, :, :, 100:300]
    one = seen(1, 1, 200, 64).expand(2, 2, 200, 64)
    return seen(2, 5, 1, 64).transpose(1, 2).expand(2, 4, 5, 64), one, one


@pytest.mark.parametrize("layout", ["transposed", "fused", "slice of a cache", "expanded"])
def test_strided_inputs_are_read_in_place(device, layout, splits):
    query, key, value = _strided(device, layout)
    right(AttentionInputs(query, key, value, scale=0.125))


def test_64_bit_addressing_gives_the_same_bits(device, monkeypatch, splits):
    inputs = few(
        device, bias=torch.randn(2, 4, 5, 200, device=device), mask=torch.rand(1, 4, 5, 200, device=device) > 0.2
    )
    inputs = with_intervals(inputs, _intervals(device, "holes"))
    results = []
    for wide in (False, True):
        monkeypatch.setattr(launch, "FORCE_WIDE", wide)
        results.append(triton.forward(inputs, TritonBackend()))
    assert all(torch.equal(narrow, wide) for narrow, wide in zip(*results, strict=True))


def test_partial_results_past_2_to_the_31_are_addressed_in_64_bits(device, monkeypatch):
    asked = []

    def index_type(*tensors):
        asked.append([tuple(tensor.shape) for tensor in tensors if tensor is not None])
        return launch.tl.int64

    monkeypatch.setattr(launch, "index_type", index_type)
    divide(monkeypatch, 3)
    triton.forward(few(device), TritonBackend())
    assert (3, 2, 4, 5, 64) in asked[0]


def test_the_same_bits_every_time(device, splits):
    inputs = few(device, q_len=2, kv_len=500, sinks=torch.zeros(4, device=device))
    first = triton.forward(inputs, TritonBackend())
    for _ in range(20 if ON_GPU else 2):
        assert all(torch.equal(a, b) for a, b in zip(first, triton.forward(inputs, TritonBackend()), strict=True))


def test_splits_agree_with_one_another(device, monkeypatch):
    inputs = few(device, kv_len=700)
    outs = []
    for number in (1, 2, 5, 11, 40):
        divide(monkeypatch, number)
        outs.append(triton.forward(inputs, TritonBackend())[1])
    for lse in outs[1:]:
        torch.testing.assert_close(lse, outs[0], rtol=1e-5, atol=1e-5)


def _rows():
    return sorted({config for _, config in configs._DECODE}, key=repr)


@pytest.mark.parametrize("config", _rows(), ids=str)
def test_every_config_is_right(device, config, monkeypatch):
    inputs = few(device, batch=1, kv_len=300, head_dim=136, dtype=torch.bfloat16 if ON_GPU else torch.float16)
    target = launch.target_of(torch.device(device))
    if not configs.is_legal(config, 136, target.smem_limit, 2, target.tma):
        pytest.skip("this config does not fit this GPU")
    monkeypatch.setattr(configs, "choose_decode", lambda *_: config)
    divide(monkeypatch, 2)
    right(inputs)
    right(few(device, batch=1, kv_len=300, head_dim=136, heads=8, kv_heads=1, dtype=inputs.query.dtype))
