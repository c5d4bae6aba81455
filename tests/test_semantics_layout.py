"""Empty calls and tensors that lie in memory in any way give the same numbers in every backend."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from oracle import BACKENDS, DEVICE, KERNELS, TOLERANCE, Served, across, assert_close, compare, truth

from ffpa_hf import RowIntervals, ffpa_attn_func

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kernel = pytest.mark.parametrize("backend", KERNELS)
N = 10


def top_left(rows: int, keys: int) -> torch.Tensor:
    return torch.arange(keys, device=DEVICE) <= torch.arange(rows, device=DEVICE)[:, None]


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


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_head_dim_of_zero_averages_the_values(return_lse):
    """All scores are zero, whatever the query: torch's answer, and ours."""
    query, key, value = (torch.randn(1, 2, length, width) for length, width in ((3, 0), (5, 0), (5, 4)))
    given = ffpa_attn_func(query, key, value, return_lse=return_lse)
    out = given[0] if return_lse else given
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand(1, 2, 3, 4))
    if return_lse:
        torch.testing.assert_close(given[1], torch.full((1, 2, 3), math.log(5)))


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
def test_tensors_whose_sign_is_not_written_yet_are_read_right(backend: Served):
    given = backend.qkv() | {"sinks": backend.randn(2, dtype=torch.float32), "bias": backend.randn(N, N)}

    def run(bias, **tensors):
        return backend(**tensors, attn_mask=bias, return_lse=True)

    for name in given:  # each alone: another one must not be what leads the call round
        tensors = {other: tensor.detach() for other, tensor in given.items()}
        tensors[name] = torch._neg_view(tensors[name])
        compare(run, tensors, needs=())
        compare(run, tensors)


@every_backend
def test_lazy_gradients_are_read_right(backend: Served):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv().items()}
    out, lse = backend(**tensors, return_lse=True)
    nothing = torch._efficientzerotensor(out.shape, dtype=out.dtype, device=DEVICE)
    of_out, of_lse = torch.randn_like(out), torch.randn_like(lse)
    for lazy, written in (
        ((torch._neg_view(of_out), of_lse), (-of_out, of_lse)),
        ((of_out, torch._neg_view(of_lse)), (of_out, -of_lse)),
        ((nothing, of_lse), (torch.zeros_like(out), of_lse)),
    ):
        found, expected = (
            torch.autograd.grad((out, lse), tuple(tensors.values()), seeds, retain_graph=True)
            for seeds in (lazy, written)
        )
        assert all(map(torch.equal, found, expected))


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
