"""Sizes at the ends, and repetition: 128k tokens, every short length, 65,536 heads, bits that stay, two GPUs."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from ffpa_hf import RowIntervals, ffpa_attn_func

pytestmark = pytest.mark.gpu

BACKENDS = ["triton", "cuda"]
GIB = 2**30


def randn(*shape: int, device: str = "cuda", grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_(grad)


def exact(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None = None) -> Tensor:
    """float64 attention; one head of keys for all of query's."""
    scores = query.double() @ key.double().transpose(-1, -2) / math.sqrt(query.shape[-1])
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    return torch.softmax(scores, -1) @ value.double()


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def step(leaves: list[Tensor], upstream: Tensor, backend: str, **more) -> list[Tensor]:
    out = ffpa_attn_func(*leaves, backend=backend, **more)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_128k_tokens_causal_within_the_documented_memory(backend):
    """Beside its results a step takes the workspace of 1 GiB, fp32 sums of dK and dV, and row statistics."""
    length, heads, width = 131072, 8, 512
    if torch.cuda.mem_get_info()[0] < 16 * GIB:
        pytest.skip("needs 16 GiB of free memory")
    leaves = [randn(1, heads, length, width, grad=True), *(randn(1, 1, length, width, grad=True) for _ in range(2))]
    upstream = randn(1, heads, length, width)
    small = [leaf.detach()[:, :, :600].clone().requires_grad_() for leaf in leaves]
    step(small, upstream[:, :, :600].clone(), backend, is_causal=True, enable_gqa=True)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, dq, dk, dv = step(leaves, upstream, backend, is_causal=True, enable_gqa=True)
    taken = torch.cuda.max_memory_allocated() - before
    results = 2 * (out.numel() + dq.numel() + dk.numel() + dv.numel())
    sums = 2 * 4 * dk.numel()
    statistics = 4 * 4 * heads * length
    assert taken <= results + sums + statistics + GIB + GIB // 8
    query, key, value = (leaf.detach() for leaf in leaves)
    for begin in (0, length // 2, length - 32):
        rows = torch.arange(begin, begin + 32, device="cuda")[:, None]
        keep = torch.arange(length, device="cuda") <= rows
        want = exact(query[:, :, begin : begin + 32], key, value, keep)
        assert error(out[:, :, begin : begin + 32], want) < 1e-2
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv))
    # The last key is seen by the last row alone: dV of it is P dO of that row, summed over the heads.
    scores = (query[0, :, -1].double() @ key[0, 0].double().T) / math.sqrt(width)
    want = (torch.softmax(scores, -1)[:, -1:] * upstream[0, :, -1].double()).sum(0)
    assert error(dv[0, 0, -1], want) < 2e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [64, 512])
def test_every_length_up_to_130(forced, backend, width):
    for length in range(1, 131):
        leaves = [randn(1, 2, length, width, grad=True) for _ in range(3)]
        upstream = randn(1, 2, length, width)
        got = step(leaves, upstream, backend, is_causal=True)
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        keep = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
        out = exact(*doubles, keep)
        want = [out.detach(), *torch.autograd.grad(out, doubles, upstream.double())]
        for name, have, expected in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            if expected.norm() > 1e-6:  # of one key, dq and dk are nothing but rounding
                assert error(have, expected) < 2e-2, (name, length)
            else:
                assert have.abs().max() < 1e-1, (name, length)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch, heads", [(65536, 1), (1, 65536)])
def test_backward_of_more_heads_than_a_grid_axis_holds(forced, backend, batch, heads):
    leaves = [randn(batch, heads, 4, 64, grad=True) for _ in range(3)]
    upstream = randn(batch, heads, 4, 64)
    got = step(leaves, upstream, backend)
    for b, h in ((0, 0), (batch - 1, heads - 1)):
        doubles = [leaf.detach()[b : b + 1, h : h + 1].double().requires_grad_() for leaf in leaves]
        out = exact(*doubles)
        want = [out.detach(), *torch.autograd.grad(out, doubles, upstream[b : b + 1, h : h + 1].double())]
        assert all(error(have[b, h], one[0, 0]) < 2e-2 for have, one in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [128, 512])
def test_fifty_backwards_give_the_same_bits(forced, backend, width):
    leaves = [randn(1, 8, 1000, width, grad=True), *(randn(1, 2, 1000, width, grad=True) for _ in range(2))]
    upstream = randn(1, 8, 1000, width)
    window = RowIntervals.sliding_window(1000, 1000, 300, "cuda")
    for more in ({"is_causal": True}, {"attn_mask": window}):
        first = step(leaves, upstream, backend, enable_gqa=True, **more)
        for _ in range(49):
            again = step(leaves, upstream, backend, enable_gqa=True, **more)
            assert all(torch.equal(got, want) for got, want in zip(again, first, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_gives_the_same_bits_on_every_stream_and_thread(forced, backend):
    query, key, value = (randn(1, 4, 1000, 512) for _ in range(3))
    want = ffpa_attn_func(query, key, value, backend=backend)
    torch.cuda.synchronize()
    results: list[Tensor] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(10):
                results.append(ffpa_attn_func(query, key, value, backend=backend))
        stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40 and all(torch.equal(got, want) for got in results)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_the_same_under_checkpointing(forced, backend, reentrant):
    leaves = [randn(1, 2, 700, 64, grad=True) for _ in range(3)]

    def attention(*tensors: Tensor) -> Tensor:
        return ffpa_attn_func(*tensors, dropout_p=0.3, backend=backend)

    torch.manual_seed(5)
    plain = torch.autograd.grad(attention(*leaves).float().square().sum(), leaves)
    torch.manual_seed(5)
    attended = torch.utils.checkpoint.checkpoint(attention, *leaves, use_reentrant=reentrant)
    attended.float().square().sum().backward()
    assert all(torch.equal(leaf.grad, want) for leaf, want in zip(leaves, plain, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", [*BACKENDS, "sdpa"])
def test_tensors_on_the_second_gpu_while_the_first_is_current(forced, backend):
    near = [randn(1, 4, 700, 512) for _ in range(3)]
    upstream = randn(1, 4, 700, 512)
    want = step([tensor.detach().requires_grad_() for tensor in near], upstream, backend)
    far = [tensor.to("cuda:1").requires_grad_() for tensor in near]
    got = step(far, upstream.to("cuda:1"), backend)
    assert torch.cuda.current_device() == 0
    assert all(one.device.index == 1 and torch.equal(one.cpu(), two.cpu()) for one, two in zip(got, want, strict=True))
    if backend != "sdpa":
        dropped = ffpa_attn_func(*far, dropout_p=0.5, backend=backend)
        assert dropped.device.index == 1 and dropped.isfinite().all()
    with pytest.raises(ValueError, match="one device is needed"):
        ffpa_attn_func(near[0], far[1], far[2], backend=backend)
