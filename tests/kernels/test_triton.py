"""The Triton kernels, forward and backward, against the float64 definition: on a GPU, or in the interpreter.

Called through the backend's own doors, below dispatch; memory that nobody wrote is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from ffpa_hf.backends import TritonBackend  # noqa: E402
from ffpa_hf.kernels import reference, triton  # noqa: E402
from ffpa_hf.kernels.common import AttentionInputs  # noqa: E402
from ffpa_hf.kernels.philox import drop_threshold, philox_keep_mask  # noqa: E402
from ffpa_hf.kernels.triton import configs, launch  # noqa: E402
from ffpa_hf.masks import RowIntervals  # noqa: E402

ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# Relative error against float64. Half precision rounds P and dS once each; float32 only accumulates.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def nan_memory():
    """Everything allocated without a value is NaN, so that reading or leaving it shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=["fused", "materialised"])
def scheme(request, device, monkeypatch):
    """Which of the two backward schemes serves a call that both can: the tables choose the fused one."""
    target = launch.target_of(torch.device(device))
    itemsize = DTYPE.itemsize

    def fits(config, head_dim):
        return configs.is_legal(config, head_dim, target.smem_limit, itemsize, target.tma)

    fused = configs._FUSED_BACKWARD_TMA * target.tma + configs._FUSED_BACKWARD_PLAIN
    materialised = configs._BACKWARD_TMA * target.tma + configs._BACKWARD_PLAIN
    if request.param == "fused":
        rows = [config for limit, config in fused if limit <= 128]
    else:
        rows = list(materialised)
    choose = configs.choose_backward

    def chosen(head_dim, *limits):
        busy = limits[-1]
        return choose(head_dim, *limits) if busy else next(config for config in rows if fits(config, head_dim))

    monkeypatch.setattr(configs, "choose_backward", chosen)
    return request.param


def make(device, *, batch=1, heads=2, kv_heads=1, q_len=96, kv_len=160, head_dim=64, dtype=DTYPE, **fields):
    def draw(n_heads, length):
        return torch.randn(batch, n_heads, length, head_dim, device=device).to(dtype)

    fields.setdefault("scale", head_dim**-0.5)
    return AttentionInputs(draw(heads, q_len), draw(kv_heads, kv_len), draw(kv_heads, kv_len), **fields)


def with_intervals(inputs, intervals):
    """`inputs` with a RowIntervals spread over its canonical fields, as the op door does it."""
    block_start, block_end = intervals.query_ranges(inputs.key.shape[2])
    start, end = torch.broadcast_tensors(intervals.start, intervals.end)
    return replace(
        inputs,
        row_start=start,
        row_end=end,
        key_mask=intervals.key_mask,
        block_start=block_start,
        block_end=block_end,
    )


def definition(inputs, grad_out, grad_lse):
    """(out, lse, gradients of query, key, value, bias, sinks) in float64, on the CPU."""

    def wide(tensor):
        return None if tensor is None else tensor.detach().cpu().double().requires_grad_()

    def plain(tensor):
        return None if tensor is None else tensor.cpu()

    q, k, v, bias, sinks = map(wide, (inputs.query, inputs.key, inputs.value, inputs.bias, inputs.sinks))
    keep = None
    if inputs.rng_state is not None:
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        keep = philox_keep_mask(inputs.rng_state.cpu(), *shape, inputs.dropout_p)
    out, lse = reference.attention(
        q,
        k,
        v,
        scale=inputs.scale,
        is_causal=inputs.is_causal,
        mask=plain(inputs.mask),
        bias=bias,
        row_start=plain(inputs.row_start),
        row_end=plain(inputs.row_end),
        key_mask=plain(inputs.key_mask),
        sinks=sinks,
        softcap=inputs.softcap,
        keep=keep,
        dropout_p=inputs.dropout_p,
    )
    outputs, seeds = [out], [grad_out.cpu().double()]
    if grad_lse is not None:
        alive = lse > -torch.inf
        outputs.append(torch.where(alive, lse, torch.zeros_like(lse)))
        seeds.append(torch.where(alive, grad_lse.cpu().double(), 0.0))
    leaves = [leaf for leaf in (q, k, v, bias, sinks) if leaf is not None]
    found = iter(torch.autograd.grad(outputs, leaves, seeds, allow_unused=True))
    gradients = [None if leaf is None else next(found) for leaf in (q, k, v, bias, sinks)]
    return out.detach(), lse.detach(), gradients


def close(name, have, want, tolerance):
    have = have.cpu().double()
    assert have.shape == want.shape, name
    assert torch.isfinite(have).all(), f"{name} holds NaN or infinity"
    error = (have - want).norm() / want.norm().clamp(min=1e-30) if want.numel() else torch.zeros(())
    if want.numel() and want.norm() == 0:
        error = have.abs().max()
    assert error <= tolerance, f"{name}: relative error {error:.2e} above {tolerance:.1e}"


def check(inputs, *, grad_lse=False, grad_out=None, lse_rows=slice(None), tolerance=None):
    """Forward and backward of the backend against the definition; returns what the backend gave.

    lse_rows: rows whose log-sum-exp is compared (float32 cannot hold that of a row of finite minima in base 2).
    """
    config = TritonBackend()
    out, lse, stats = triton.forward(inputs, config)
    assert out.stride() == torch.empty_like(inputs.query).stride()
    grad_out = torch.randn_like(out) if grad_out is None else grad_out
    lse_seed = torch.randn_like(lse) if grad_lse else None
    needs = (True, True, True, inputs.bias is not None, inputs.sinks is not None)
    gradients = triton.backward(inputs, out, lse, stats, grad_out, lse_seed, needs, config)

    want_out, want_lse, want = definition(inputs, grad_out, lse_seed)
    tolerance = tolerance or TOLERANCE[inputs.query.dtype]
    close("out", out, want_out, tolerance)
    dead = want_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, dead)
    finite = lse.cpu().masked_fill(dead, 0.0)[:, :, lse_rows], want_lse.masked_fill(dead, 0.0)[:, :, lse_rows]
    close("lse", *finite, tolerance)
    assert not out.cpu().masked_select(dead[..., None]).any(), "a row without keys is not zero"
    for name, have, expected in zip(("dq", "dk", "dv", "dbias", "dsinks"), gradients, want, strict=True):
        if expected is None:
            assert have is None, name
        else:
            close(name, have, expected, 2 * tolerance)
    return out, lse, stats, gradients


HEAD_DIMS = [64, 72, 128, 192, 256, 320, 512, 640, 1024]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_kind_of_head_dim(device, head_dim):
    check(make(device, head_dim=head_dim, batch=1, heads=2, kv_heads=1, q_len=72, kv_len=100))


@pytest.mark.parametrize("dtype", [torch.float16] + ([torch.bfloat16] if ON_GPU else []))
@pytest.mark.parametrize("head_dim", [64, 320])
def test_half_precision(device, head_dim, dtype):
    check(make(device, head_dim=head_dim, dtype=dtype, batch=1, is_causal=True))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 130), (7, 33), (64, 64), (130, 70), (65, 257)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_that_fit_no_tile(device, lengths, is_causal):
    q_len, kv_len = lengths
    check(make(device, q_len=q_len, kv_len=kv_len, is_causal=is_causal, batch=1), grad_lse=True)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_groups_of_query_heads(device, heads):
    check(make(device, heads=heads[0], kv_heads=heads[1], is_causal=True))


def _mask_shapes(inputs):
    batch, heads, q_len, _ = inputs.query.shape
    return {
        "full": (batch, heads, q_len, inputs.key.shape[2]),
        "per batch": (batch, 1, q_len, inputs.key.shape[2]),
        "per head": (1, heads, q_len, inputs.key.shape[2]),
        "keys": (batch, 1, 1, inputs.key.shape[2]),
        "rows": (1, heads, q_len, 1),
        "heads": (1, heads, 1, 1),
    }


MASK_SHAPES = ["full", "per batch", "per head", "keys", "rows", "heads"]


@pytest.mark.parametrize("kind", MASK_SHAPES)
def test_bool_masks_of_every_broadcast_shape(device, kind):
    inputs = make(device, batch=2, q_len=70)
    mask = torch.rand(_mask_shapes(inputs)[kind], device=device) > 0.4
    if kind == "full":
        mask[0, 0, :3] = False  # rows without keys
        mask[:, :, :, 140:] = False
    check(replace(inputs, mask=mask), grad_lse=True)


@pytest.mark.parametrize("kind", MASK_SHAPES)
def test_additive_masks_and_their_gradient(device, kind):
    inputs = make(device, batch=2, q_len=70, kv_len=100)
    bias = torch.randn(_mask_shapes(inputs)[kind], device=device)
    check(replace(inputs, bias=bias), grad_lse=True)


def test_an_additive_mask_in_the_inputs_dtype(device):
    inputs = make(device, dtype=torch.float16)
    check(replace(inputs, bias=torch.randn(1, 2, 96, 160, device=device).half()))


def test_a_broadcast_view_of_a_mask_is_read_through_its_strides(device):
    inputs = make(device, batch=2)
    mask = (torch.rand(2, 1, 1, 160, device=device) > 0.5).expand(2, 2, 96, 160)
    bias = torch.randn(96, 160, device=device).t().contiguous().t().expand(2, 2, 96, 160)
    check(replace(inputs, mask=mask, bias=bias))


def test_infinite_and_finite_minima(device):
    inputs = make(device, batch=2)
    bias = torch.zeros(2, 1, 96, 160, device=device)
    bias[0, 0, 0] = float("-inf")  # a row without keys
    bias[0, 0, 1] = torch.finfo(torch.float32).min  # the average of all values
    bias[0, 0, 2, :100] = torch.finfo(torch.float32).min
    bias[1, 0, 3, 5:] = float("-inf")
    bias[1, 0, 3, :5] = torch.finfo(torch.float32).min  # the average of five
    out, _, _, _ = check(replace(inputs, bias=bias), lse_rows=slice(4, None))
    mean = inputs.value[0, 0].double().mean(0)
    assert torch.allclose(out[0, 0, 1].double(), mean, atol=1e-2)


def test_two_planes_of_finite_minima_added(device):
    inputs = make(device, batch=1)
    lowest = torch.finfo(torch.float32).min
    bias = torch.full((1, 1, 96, 160), lowest, device=device) + torch.full((1, 1, 96, 160), lowest, device=device)
    assert torch.isinf(bias).all()
    out, lse, _, _ = check(replace(inputs, bias=bias))
    assert not out.any() and torch.isinf(lse).all()


def _interval_cases(device, q_len, kv_len):
    rows = torch.arange(q_len, dtype=torch.int32, device=device)[None]
    offsets = torch.tensor([0, 30, 30, 95, q_len], device=device)
    images = RowIntervals.causal(q_len, kv_len, device)
    images = RowIntervals(images.start, torch.where((rows > 40) & (rows < 60), 60, images.end).to(torch.int32))
    key_mask = torch.ones(2, kv_len, dtype=torch.bool, device=device)
    key_mask[0, :70] = False
    key_mask[1, 50:55] = False
    causal = RowIntervals.causal_lower_right(q_len, kv_len, device)
    ragged = torch.stack([rows[0] // 3, rows[0] * 0])
    return {
        "full": RowIntervals.full(q_len, kv_len, device),
        "causal": RowIntervals.causal(q_len, kv_len, device),
        "lower right": causal,
        "window": RowIntervals.sliding_window(q_len, kv_len, 20, device),
        "window both sides": RowIntervals.sliding_window(q_len, kv_len, 9, device, causal=False, lower_right=True),
        "documents": RowIntervals.packed(offsets, offsets, q_len, causal=True),
        "image inside text": images,
        "padding": RowIntervals(causal.start, causal.end, key_mask),
        "out of range": RowIntervals(rows - 50, rows * 4 + 10),
        "some rows see nothing": RowIntervals(rows, torch.where(rows % 40 < 35, rows + 3, rows - 2).to(torch.int32)),
        "nothing": RowIntervals(rows, rows),
        "far apart": RowIntervals(rows % 2 * (kv_len - 9), rows % 2 * (kv_len - 9) + 9),
        "per batch item": RowIntervals(ragged.to(torch.int32), (ragged + 40).to(torch.int32)),
    }


INTERVALS = sorted(_interval_cases("cpu", 96, 160))


@pytest.mark.parametrize("kind", INTERVALS)
def test_row_intervals(device, kind, scheme):
    inputs = make(device, q_len=150, kv_len=150 if kind == "documents" else 200, heads=1, batch=2)
    intervals = _interval_cases(device, 150, inputs.key.shape[2])[kind]
    check(with_intervals(inputs, intervals), grad_lse=True)


@pytest.mark.parametrize("kind", INTERVALS)
def test_row_intervals_in_one_loop_over_the_keys(device, kind, monkeypatch):
    """What wide heads get on Hopper: no loop of its own for the keys that every row of a tile sees."""
    inputs = make(device, q_len=150, kv_len=150 if kind == "documents" else 200, heads=1, batch=2)
    intervals = _interval_cases(device, 150, inputs.key.shape[2])[kind]
    choose = configs.choose_forward
    monkeypatch.setattr(configs, "choose_forward", lambda *limits: replace(choose(*limits), phased=False))
    check(with_intervals(inputs, intervals), grad_lse=True)


def test_blocks_outside_every_interval_are_never_read(device, scheme):
    """Keys that no row sees may hold anything: their blocks are skipped, forward and backward."""
    inputs = make(device, batch=1, q_len=96, kv_len=512)
    rows = torch.arange(96, dtype=torch.int32, device=device)[None]
    inputs = with_intervals(inputs, RowIntervals(rows * 0 + 256, rows * 0 + 320))
    key, value = inputs.key.clone(), inputs.value.clone()
    for poisoned in (key, value):
        poisoned[:, :, :128] = float("nan")
        poisoned[:, :, 384:] = float("nan")
    config = TritonBackend()
    grad_out = torch.randn_like(inputs.query)
    needs = (True, True, True, False, False)
    results = []
    for call in (inputs, replace(inputs, key=key, value=value)):
        out, lse, stats = triton.forward(call, config)
        results.append((out, lse, *triton.backward(call, out, lse, stats, grad_out, None, needs, config)[:3]))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


def test_intervals_without_query_ranges_are_right_too(device, scheme):
    inputs = make(device, q_len=130, kv_len=200)
    inputs = with_intervals(inputs, RowIntervals.sliding_window(130, 200, 20, device))
    check(replace(inputs, block_start=None, block_end=None))


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(device, softcap):
    inputs = make(device, softcap=softcap, is_causal=True)
    bias = torch.randn(1, 2, 96, 160, device=device)
    check(inputs, grad_lse=True)
    check(replace(inputs, bias=bias, is_causal=False))


def test_softcap_far_beyond_its_range(device):
    # Saturated scores have almost no gradient, 1 - tanh^2: what is left of it is mostly rounding.
    check(make(device, softcap=2.0, scale=100.0), tolerance=max(1e-3, TOLERANCE[DTYPE]))


def test_sinks_and_their_gradient(device):
    sinks = torch.tensor([0.7, float("-inf")], device=device)
    inputs = make(device, sinks=sinks, is_causal=True)
    check(inputs, grad_lse=True)
    mask = torch.rand(1, 2, 96, 160, device=device) > 0.5
    mask[:, :, 4] = False
    check(replace(inputs, mask=mask, is_causal=False))
    check(replace(inputs, bias=torch.randn(1, 2, 96, 160, device=device), is_causal=False), grad_lse=True)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(device, scale):
    check(make(device, scale=scale, batch=1, is_causal=True))


@pytest.mark.parametrize("dropout_p", [0.2, 0.75])
def test_dropout_forward_and_backward(device, dropout_p):
    rng_state = torch.tensor([2**41 + 12345, 2**33 + 7], device=device)
    inputs = make(device, dropout_p=dropout_p, rng_state=rng_state, kv_len=150)
    check(inputs, grad_lse=True)
    check(replace(inputs, is_causal=True, bias=torch.randn(1, 1, 96, 150, device=device), softcap=5.0))


def test_dropout_of_everything(device):
    rng_state = torch.tensor([1, 2], device=device)
    out, *_ = triton.forward(make(device, dropout_p=1.0, rng_state=rng_state), TritonBackend())
    assert not out.any()


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_the_kernels_drop_what_the_definition_says(device, dropout_p):
    """With equal scores and V = identity the output is the keep mask, in both kernels' tilings."""
    batch, heads, q_len, kv_len = 2, 2, 70, 64
    rng_state = torch.tensor([-(2**50) - 3, 2**40 + 9], device=device)
    inputs = make(
        device, batch=batch, heads=heads, kv_heads=heads, q_len=q_len, kv_len=kv_len, dropout_p=dropout_p,
        rng_state=rng_state, scale=0.0,
    )  # fmt: skip
    eye = torch.eye(kv_len, device=device, dtype=DTYPE).expand(batch, heads, kv_len, kv_len)
    out, lse, stats = triton.forward(replace(inputs, value=eye), TritonBackend())
    keep = philox_keep_mask(rng_state, batch, heads, q_len, kv_len, dropout_p)
    assert torch.equal(out > 0, keep)
    # dV = P^T dO with dO = identity rows: the same mask, transposed, from the backward's tiles.
    rows = torch.eye(q_len, kv_len, device=device, dtype=DTYPE).expand(batch, heads, q_len, kv_len)
    needs = (False, False, True, False, False)
    _, _, dv, _, _ = triton.backward(inputs, out, lse, stats, rows.contiguous(), None, needs, TritonBackend())
    assert torch.equal((dv > 0).transpose(-1, -2)[..., :64, :], keep[:, :, :64])


def test_drop_threshold_is_exact_at_the_ends():
    assert drop_threshold(0.0) == 0 and drop_threshold(1.0) == 2**32 and drop_threshold(0.5) == 2**31


# --- layouts ---------------------------------------------------------------------------------------------------------


def _layouts(device):
    batch, heads, length, head_dim = 2, 2, 96, 64

    def seen(tensor):
        return tensor.to(DTYPE)

    fused = seen(torch.randn(batch, length, 3, heads, head_dim, device=device))
    wide = seen(torch.randn(batch, heads, length, 2 * head_dim, device=device))
    one = seen(torch.randn(1, 1, length, head_dim, device=device)).expand(batch, heads, length, head_dim)
    transposed = seen(torch.randn(batch, length, heads, head_dim, device=device)).transpose(1, 2)
    return {
        "transposed": (transposed, transposed.flip(0).transpose(1, 2).contiguous().transpose(1, 2), transposed),
        "fused": tuple(fused[:, :, part].transpose(1, 2) for part in range(3)),
        "sliced": (wide[..., :head_dim], wide[..., head_dim:], wide[..., :head_dim]),
        "expanded": (one, one, one),
        "every other row": (wide[:, :, ::2, :head_dim], wide[:, :, 1::2, :head_dim], wide[:, :, ::2, head_dim:]),
    }


LAYOUTS = ["transposed", "fused", "sliced", "expanded", "every other row"]


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_are_read_in_place(device, layout, tma, monkeypatch):
    if tma and ON_GPU and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this GPU has no TMA")
    monkeypatch.setattr(launch, "FORCE_TMA", tma)
    query, key, value = _layouts(device)[layout]
    check(AttentionInputs(query, key, value, scale=0.125, is_causal=True))


@pytest.mark.parametrize("head_dim", [72, 320])
def test_descriptors_give_what_pointers_give(device, head_dim, monkeypatch):
    if ON_GPU and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this GPU has no TMA")
    inputs = make(device, head_dim=head_dim, is_causal=True, batch=1, kv_len=90)
    monkeypatch.setattr(launch, "FORCE_TMA", True)
    check(inputs)


def test_gradients_that_arrive_strided_or_expanded(device):
    inputs = make(device, batch=2)
    ones = torch.ones((), device=device, dtype=DTYPE).expand(2, 2, 96, 64)
    check(inputs, grad_out=ones)
    check(inputs, grad_out=torch.randn(2, 96, 2, 64, device=device).to(DTYPE).transpose(1, 2))
    check(inputs, grad_out=torch.randn(2, 2, 64, 96, device=device).to(DTYPE).transpose(2, 3))


def test_64_bit_addressing_gives_the_same_bits(device, monkeypatch):
    intervals = RowIntervals.sliding_window(96, 160, 40, device)
    key_mask = torch.rand(2, 160, device=device) > 0.2
    inputs = with_intervals(make(device, batch=2), RowIntervals(intervals.start, intervals.end, key_mask))
    inputs = replace(
        inputs, bias=torch.randn(2, 2, 96, 160, device=device), mask=torch.rand(1, 2, 96, 160, device=device) > 0.2
    )
    grad_out = torch.randn_like(inputs.query)
    needs = (True, True, True, True, False)
    results = []
    for wide in (False, True):
        monkeypatch.setattr(launch, "FORCE_WIDE", wide)
        out, lse, stats = triton.forward(inputs, TritonBackend())
        gradients = triton.backward(inputs, out, lse, stats, grad_out, None, needs, TritonBackend())
        results.append((out, lse, stats, *gradients))
    for narrow, wide in zip(*results, strict=True):
        assert narrow is wide or torch.equal(narrow, wide)


def test_64_bit_addressing_starts_where_an_offset_can_pass_2_to_the_31():
    def view(rows, stride):
        return torch.empty_strided((1, 1, rows, 64), (0, 0, stride, 1), device="meta")

    assert not launch.needs_wide(view(1024, 64))
    assert launch.needs_wide(view(2, 2**31 // 16))
    assert launch.needs_wide(view(65536, 3 * 32 * 512))
    assert launch.needs_wide(None, torch.empty_strided((3, 1, 8, 64), (2**30, 0, 64, 1), device="meta"))
    assert not launch.needs_wide(torch.empty_strided((1, 1, 8, 64), (2**40, 2**40, 64, 1), device="meta"))


# --- empty dims ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 2, 1, 8, 8), (1, 0, 0, 8, 8), (1, 2, 1, 0, 8), (1, 2, 1, 8, 0)])
def test_sizes_of_zero(device, shape):
    batch, heads, kv_heads, q_len, kv_len = shape
    inputs = make(device, batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len)
    out, lse, stats = triton.forward(inputs, TritonBackend())
    needs = (True, True, True, False, False)
    gradients = triton.backward(inputs, out, lse, stats, torch.randn_like(out), None, needs, TritonBackend())
    assert out.shape == inputs.query.shape and not out.any()
    assert lse.shape == out.shape[:3] and (lse == -torch.inf).all()
    for gradient, tensor in zip(gradients[:3], (inputs.query, inputs.key, inputs.value), strict=True):
        assert gradient.shape == tensor.shape and not gradient.any()


def test_no_keys_but_a_sink(device):
    sinks = torch.tensor([0.5, float("-inf")], device=device)
    inputs = make(device, kv_len=0, sinks=sinks)
    out, lse, stats = triton.forward(inputs, TritonBackend())
    assert not out.any() and (lse[:, 0] == 0.5).all() and (lse[:, 1] == -torch.inf).all()
    needs = (False, False, False, False, True)
    grad_lse = torch.ones_like(lse)
    *_, dsinks = triton.backward(inputs, out, lse, stats, out, grad_lse, needs, TritonBackend())
    assert torch.equal(dsinks, torch.tensor([96.0, 0.0], device=device))


# --- backward: bands, subsets, determinism ----------------------------------------------------------------------------


# Scratch in KiB that holds rows of one head, one head, and one group of the case below; P and dS take twice as much.
@pytest.mark.parametrize(("case", "limit_kb"), [("plain", 1), ("causal", 100), ("window", 100), ("causal", 200),
                                                ("window", 300)])  # fmt: skip
def test_every_way_of_dividing_the_scratch_gives_the_gradients(device, case, limit_kb, scheme, monkeypatch):
    inputs = make(device, heads=4, kv_heads=2, q_len=200, kv_len=120, is_causal=case == "causal")
    if case == "window":
        inputs = with_intervals(inputs, RowIntervals.sliding_window(200, 120, 30, device))
    plans = []
    divide = configs.plan_backward

    def limited(*shape, itemsize, matrices, **rest):
        rest["limit"] = limit_kb * 1024 * itemsize // 4 * matrices
        plans.append(divide(*shape, itemsize=itemsize, matrices=matrices, **rest))
        return plans[-1]

    monkeypatch.setattr(configs, "plan_backward", limited)
    check(inputs)
    (plan,) = plans
    assert len(plan.rounds) > 1
    assert plan.banded == (limit_kb < 300)


@pytest.mark.parametrize("with_bias", [False, True])
def test_only_the_gradients_asked_for(device, with_bias):
    inputs = make(device, sinks=torch.zeros(2, device=device))
    if with_bias:
        inputs = replace(inputs, bias=torch.randn(1, 2, 96, 160, device=device))
    out, lse, stats = triton.forward(inputs, TritonBackend())
    grad_out = torch.randn_like(out)
    all_needs = (True, True, True, with_bias, True)
    everything = triton.backward(inputs, out, lse, stats, grad_out, None, all_needs, TritonBackend())
    for wanted in range(5):
        if not all_needs[wanted]:
            continue
        needs = tuple(index == wanted for index in range(5))
        alone = triton.backward(inputs, out, lse, stats, grad_out, None, needs, TritonBackend())
        assert [gradient is not None for gradient in alone] == list(needs)
        assert torch.equal(alone[wanted], everything[wanted])


@pytest.mark.parametrize("with_bias", [False, True])
def test_backward_is_the_same_bit_for_bit_every_time(device, with_bias):
    inputs = make(device, heads=4, kv_heads=2, is_causal=True)
    if with_bias:
        inputs = replace(inputs, bias=torch.randn(1, 1, 1, 160, device=device))
    out, lse, stats = triton.forward(inputs, TritonBackend())
    grad_out = torch.randn_like(out)
    needs = (True, True, True, with_bias, False)
    first = triton.backward(inputs, out, lse, stats, grad_out, None, needs, TritonBackend())
    for _ in range(20 if ON_GPU else 1):
        again = triton.backward(inputs, out, lse, stats, grad_out, None, needs, TritonBackend())
        assert all(a is b or torch.equal(a, b) for a, b in zip(first, again, strict=True))


# --- the forward for wide heads ---------------------------------------------------------------------------------------

SMALL = configs.WideConfig(configs.ScoresConfig(64, 64, 64, 4, 2), configs.ProductConfig(64, 64, 32, 4, 2))


@pytest.fixture
def wide(monkeypatch):
    """Every forward takes the wide kernels, in rounds of three blocks of rows."""
    monkeypatch.setattr(configs, "choose_wide", lambda *_: SMALL)

    def three_blocks(config, lanes, q_len, *_):
        tiles = -(-q_len // config.scores.block_m)
        if tiles > 3:
            return [configs.WideRound(lane, 1, tile, min(3, tiles - tile)) for lane in range(lanes)
                    for tile in range(0, tiles, 3)]  # fmt: skip
        count = 3 // tiles
        return [configs.WideRound(lane, min(count, lanes - lane), 0, tiles) for lane in range(0, lanes, count)]

    monkeypatch.setattr(configs, "wide_rounds", three_blocks)


def _wide_cases(device):
    rng_state = torch.tensor([5, 2**34 + 1], device=device)
    mask = torch.rand(1, 2, 150, 200, device=device) > 0.4
    mask[:, :, 3] = False
    bias = torch.randn(1, 2, 150, 200, device=device)
    bias[:, :, 4] = torch.finfo(torch.float32).min
    bias[:, :, 5] = float("-inf")
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "mask": {"mask": mask},
        "bias": {"bias": bias},
        "sinks": {"sinks": torch.tensor([3.0, float("-inf")], device=device)},
        "dropout": {"dropout_p": 0.3, "rng_state": rng_state, "is_causal": True},
        "softcap": {"softcap": 3.0},
    }


@pytest.mark.parametrize("kind", sorted(_wide_cases("cpu")))
def test_the_forward_for_wide_heads(device, kind, wide):
    inputs = make(device, head_dim=72, q_len=150, kv_len=200, **_wide_cases(device)[kind])
    check(inputs, lse_rows=slice(5, None))


@pytest.mark.parametrize("kind", ["window", "some rows see nothing", "padding"])
def test_the_forward_for_wide_heads_skips_by_intervals(device, kind, wide):
    inputs = make(device, batch=2, heads=1, q_len=250, kv_len=300)
    check(with_intervals(inputs, _interval_cases(device, 250, 300)[kind]))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_reference_that_must_move_keeps_every_key(device, is_causal, wide, monkeypatch):
    """Scores grow along the keys far beyond the margin, so that sums are rescaled between segments."""
    moves = []
    product = launch.forward_product

    class Watched:
        def __getitem__(self, grid):
            def launch_product(*args, **kwargs):
                moves.append(next(arg for arg in args if getattr(arg, "dtype", None) == torch.int32)[:, 0].max().item())
                product[grid](*args, **kwargs)  # gives no compiled kernel that could be started past us

            return launch_product

    monkeypatch.setattr(launch, "forward_product", Watched())
    inputs = make(device, q_len=150, kv_len=260, scale=1.0, is_causal=is_causal)
    growth = torch.linspace(0.0, 4.0, 260, device=device)[:, None].to(DTYPE)
    check(replace(inputs, key=inputs.key * growth), tolerance=max(1e-4, TOLERANCE[DTYPE]))
    assert max(moves) >= 2


# --- configs: one pinned above, all of them here ----------------------------------------------------------------------


def _forward_rows():
    tables = configs._FORWARD_TMA + configs._FORWARD_PLAIN + configs._FORWARD_FEW_ROWS
    return sorted({config for _, config in tables}, key=repr)


@pytest.mark.slow
@pytest.mark.parametrize("config", _forward_rows(), ids=str)
def test_every_forward_config_is_right(device, config, monkeypatch):
    head_dim = 72 if config.width > 256 and not config.chunk else 136
    inputs = make(device, head_dim=head_dim, batch=1, q_len=150, kv_len=300, is_causal=True)
    target = launch.target_of(torch.device(device))
    if not configs.is_legal(config, head_dim, target.smem_limit, inputs.query.element_size(), target.tma):
        pytest.skip("this config does not fit this GPU")
    monkeypatch.setattr(configs, "choose_forward", lambda *_: config)
    check(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("config", configs._BACKWARD_TMA + configs._BACKWARD_PLAIN, ids=str)
def test_every_backward_config_is_right(device, config, monkeypatch):
    inputs = make(device, head_dim=72, batch=1, q_len=150, kv_len=300, is_causal=True)
    inputs = replace(inputs, bias=torch.randn(1, 2, 150, 300, device=device))
    target = launch.target_of(torch.device(device))
    if not configs.is_legal(config, 72, target.smem_limit, inputs.query.element_size(), target.tma):
        pytest.skip("this config does not fit this GPU")
    monkeypatch.setattr(configs, "choose_backward", lambda *_: config)
    check(inputs)


def _fused_rows():
    tables = configs._FUSED_BACKWARD_TMA + configs._FUSED_BACKWARD_PLAIN
    return sorted({config for _, config in tables}, key=repr)


@pytest.mark.slow
@pytest.mark.parametrize("config", _fused_rows(), ids=str)
@pytest.mark.parametrize("case", ["causal", "window"])
@pytest.mark.parametrize("head_dim", [72, 128])
def test_every_fused_backward_config_is_right(device, config, case, head_dim, monkeypatch):
    inputs = make(
        device, head_dim=head_dim, batch=1, heads=4, kv_heads=2, q_len=150, kv_len=300, is_causal=case == "causal"
    )
    if case == "window":
        inputs = with_intervals(inputs, RowIntervals.sliding_window(150, 300, 70, device, lower_right=True))
    target = launch.target_of(torch.device(device))
    if not configs.is_legal(config, head_dim, target.smem_limit, inputs.query.element_size(), target.tma):
        pytest.skip("this config does not fit this GPU")
    monkeypatch.setattr(configs, "choose_backward", lambda *_: config)
    check(inputs)
