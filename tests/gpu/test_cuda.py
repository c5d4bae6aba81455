"""The CUDA C++ forward on a GPU: no copies, odd lengths, every mask, and the Triton backward that goes with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ffpa_hf import CUDABackend, RowIntervals, explain, ffpa_attn_func, settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="the kernels need sm_80"
    ),
]

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
FAMILIES = ["native", *(["tma"] if IS_HOPPER else [])]


@pytest.fixture(autouse=True)
def unproved():
    """Kernels run here before any verdict: these tests are part of their proof."""
    with settings.override(allow_unqualified=True):
        yield


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def exact(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None = None) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    return torch.nan_to_num(torch.softmax(scores, -1)) @ value


def distance(given: Tensor, want: Tensor) -> float:
    return ((given.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["[B, N, 3, H, D]", "[B, N, 3 H D]", "expanded"])
def test_nothing_is_allocated_but_the_output_and_the_log_sum_exp(forced, family, layout):
    batch, rows, heads, width = 2, 1000, 4, 512
    if layout == "expanded":
        query = randn(batch, rows, heads, width).transpose(1, 2)
        key, value = (randn(1, 1, rows, width).expand(batch, heads, rows, width) for _ in range(2))
    else:
        parts = randn(batch, rows, 3 * heads * width).view(batch, rows, 3, heads, width).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
    backend = CUDABackend(family=family)
    with torch.no_grad():
        ffpa_attn_func(query, key, value, backend=backend)  # compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = ffpa_attn_func(query, key, value, backend=backend)
        taken = torch.cuda.max_memory_allocated() - before
    assert taken <= out.numel() * 2 + batch * heads * rows * 4 + 1024
    assert out.transpose(1, 2).is_contiguous()
    assert distance(out, exact(query.double(), key.double(), value.double())) < 5e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mask", ["causal", "window", "padding", "bool"])
def test_a_training_step_pairs_with_the_triton_backward(forced, family, mask):
    rows, heads, kv_heads = 900, 8, 2
    leaves = [randn(1, h, rows, 512).requires_grad_() for h in (heads, kv_heads, kv_heads)]
    row, key = torch.arange(rows, device="cuda")[:, None], torch.arange(rows, device="cuda")
    more: dict = {}
    if mask == "causal":
        more, keep = {"is_causal": True}, key <= row
    elif mask == "window":
        more["attn_mask"] = RowIntervals.sliding_window(rows, rows, 200, device="cuda")
        keep = (key <= row) & (key > row - 200)
    elif mask == "padding":
        there = (key >= 70)[None]
        full = RowIntervals.causal(rows, rows, device="cuda")
        more["attn_mask"], keep = RowIntervals(full.start, full.end, there), (key <= row) & there
    else:
        keep = torch.rand(rows, rows, device="cuda") < 0.5
        keep[5] = False
        more["attn_mask"] = keep
    backend = CUDABackend(family=family)
    plan = explain(*leaves, **more, enable_gqa=True, backend=backend)
    assert (plan.forward, plan.backward) == ("cuda", "triton"), plan
    out = ffpa_attn_func(*leaves, **more, enable_gqa=True, backend=backend)
    upstream = randn(*out.shape)
    found = torch.autograd.grad(out, leaves, upstream)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = exact(*doubles, keep.expand(1, heads, rows, rows) if keep.dim() == 2 else keep)
    wanted = torch.autograd.grad(want, doubles, upstream.double())
    for given, expected in zip((out, *found), (want, *wanted), strict=True):
        assert distance(given.detach(), expected.detach()) < 8e-3


@pytest.mark.skipif(not IS_HOPPER, reason="the twin kernel needs Hopper")
def test_long_rows_of_growing_scores_are_rescaled_rightly(forced):
    """References move at every step, in both blocks of a cluster by turns."""
    query, key, value = randn(1, 2, 256, 512), randn(1, 2, 4096, 512), randn(1, 2, 4096, 512)
    ramp = torch.linspace(0.05, 6.0, 4096, device="cuda", dtype=torch.bfloat16)[:, None]
    key = key * ramp
    out = ffpa_attn_func(query, key, value, backend=CUDABackend(family="tma"))
    assert distance(out, exact(query.double(), key.double(), value.double())) < 5e-3


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("head_dim", [64, 128, 200, 320, 384, 448, 512])
@pytest.mark.parametrize("family", FAMILIES)
def test_odd_lengths(forced, family, head_dim, length):
    for keys in (1, 63, 64, 65, 128, 129, 300):
        query = randn(1, 2, length, head_dim)
        key, value = randn(1, 2, keys, head_dim), randn(1, 2, keys, head_dim)
        out, lse = ffpa_attn_func(query, key, value, backend=CUDABackend(family=family), return_lse=True)
        assert distance(out, exact(query.double(), key.double(), value.double())) < 5e-3
        scores = query.double() @ key.double().transpose(-1, -2) / math.sqrt(head_dim)
        assert torch.allclose(lse.double(), torch.logsumexp(scores, -1), atol=1e-3)
