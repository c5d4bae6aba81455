"""What only a GPU can show: streams, graphs, alignment, offsets past 2^31, huge batches, memory peaks.

Errors are judged against float64 on the same inputs. Every kernel backend that is built is tested by name.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ffpa_hf
from ffpa_hf import RowIntervals, ffpa_attn_func

pytestmark = pytest.mark.gpu

BACKENDS = ["triton", "cuda"]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def exact(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None = None) -> Tensor:
    """float64 attention written out; heads are repeated, rows without keys give zeros."""
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.nan_to_num(torch.softmax(scores, -1)) @ v


def error(out: Tensor, want: Tensor) -> float:
    return ((out.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_on_the_current_stream_after_queued_work(forced, backend):
    query, key, value = (randn(1, 4, 1024, 128) for _ in range(3))
    want = ffpa_attn_func(query, key, value, backend=backend)
    side = torch.cuda.Stream()
    source = torch.empty_like(query).fill_(float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        source.copy_(query)
        got = ffpa_attn_func(source, key, value, backend=backend)
    side.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_replay_sees_new_inputs_forward_and_backward(forced, backend):
    query, key, value = (randn(1, 4, 640, 512, grad=True) for _ in range(3))
    upstream = randn(1, 4, 640, 512)

    def step() -> tuple[Tensor, ...]:
        out = ffpa_attn_func(query, key, value, is_causal=True, backend=backend)
        return (out.detach(), *torch.autograd.grad(out, (query, key, value), upstream))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in (query, key, value, upstream):
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    replayed = [tensor.clone() for tensor in captured]
    for got, want in zip(replayed, step(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_in_a_graph_draws_anew_at_each_replay(forced, backend):
    query, key, value = (randn(1, 2, 512, 64) for _ in range(3))
    ffpa_attn_func(query, key, value, dropout_p=0.5, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ffpa_attn_func(query, key, value, dropout_p=0.5, backend=backend)
    graph.replay()
    first = out.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(first, out)


@pytest.mark.parametrize("backend", ["sdpa", *BACKENDS])
@pytest.mark.parametrize("which", ["query", "key", "value", "upstream", "mask"])
@pytest.mark.parametrize("how", ["offset", "padded rows"])
def test_unaligned_views_are_right(forced, backend, which, how):
    def unaligned(tensor: Tensor) -> Tensor:
        if how == "offset":
            flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:]
            return flat.view(tensor.shape).copy_(tensor)
        wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype, device="cuda")
        return wide[..., :-1].copy_(tensor)

    tensors = {name: randn(1, 2, 520, 64) for name in ("query", "key", "value", "upstream")}
    tensors["mask"] = randn(1, 1, 520, 520)
    want = _forward_backward(tensors, backend)
    tensors[which] = unaligned(tensors[which])
    for got, expected in zip(_forward_backward(tensors, backend), want, strict=True):
        assert torch.equal(got, expected) if backend != "sdpa" else error(got, expected) < 1e-2


def _forward_backward(tensors: dict[str, Tensor], backend: str) -> list[Tensor]:
    leaves = [tensors[name].detach().requires_grad_() for name in ("query", "key", "value")]
    out = ffpa_attn_func(*leaves, attn_mask=tensors["mask"], backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors["upstream"])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_stride_past_two_to_the_31(forced, backend):
    stride = 2**31 + 2**10
    store = torch.empty(stride + 2**20, dtype=torch.bfloat16, device="cuda")
    views = []
    for offset in (0, 2**18, 2**19):
        view = store[offset:].as_strided((2, 2, 512, 64), (stride, 512 * 64, 64, 1))
        views.append(view.copy_(torch.randn(2, 2, 512, 64, device="cuda")))
    leaves = [view.detach().requires_grad_() for view in views]
    packed = [view.detach().contiguous().requires_grad_() for view in views]
    upstream = randn(2, 2, 512, 64)
    for far, near in zip(_grads(leaves, upstream, backend), _grads(packed, upstream, backend), strict=True):
        assert torch.equal(far, near)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_stride_past_two_to_the_31(forced, backend):
    rows, stride = 520, 2**31 // 512
    store = torch.empty((rows - 1) * stride + 64, dtype=torch.bfloat16, device="cuda")
    views = [store.as_strided((1, 1, rows, 64), (store.numel(), store.numel(), stride, 1)) for _ in range(2)]
    data = randn(1, 1, rows, 64)
    views[0].copy_(data)
    leaves = [views[0].detach().requires_grad_() for _ in range(3)]
    packed = [data.detach().clone().requires_grad_() for _ in range(3)]
    upstream = randn(1, 1, rows, 64)
    for far, near in zip(_grads(leaves, upstream, backend), _grads(packed, upstream, backend), strict=True):
        assert torch.equal(far, near)


def _grads(leaves: list[Tensor], upstream: Tensor, backend: str) -> list[Tensor]:
    out = ffpa_attn_func(*leaves, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch, heads", [(65536, 1), (1, 65536), (8192, 16)])
def test_more_batches_and_heads_than_a_grid_axis_holds(forced, backend, batch, heads):
    query, key, value = (randn(batch, heads, 8, 64) for _ in range(3))
    out = ffpa_attn_func(query, key, value, backend=backend)
    for b, h in ((0, 0), (batch - 1, heads - 1), (batch // 2, heads // 2)):
        want = exact(*(t[b : b + 1, h : h + 1] for t in (query, key, value)))
        assert error(out[b, h], want[0, 0]) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_query_tiles_than_a_grid_axis_holds(forced, backend):
    query, key, value = randn(1, 1, 65536 * 65, 64), randn(1, 1, 16, 64), randn(1, 1, 16, 64)
    out = ffpa_attn_func(query, key, value, backend=backend)
    assert error(out[..., -100:, :], exact(query[..., -100:, :], key, value)) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_is_bit_equal_over_twenty_runs(forced, backend):
    leaves = [randn(1, 8, 1024, 512, grad=True), randn(1, 2, 1024, 512, grad=True), randn(1, 2, 1024, 512, grad=True)]
    upstream = randn(1, 8, 1024, 512)
    mask = RowIntervals.sliding_window(1024, 1024, 300, "cuda")

    def run() -> list[Tensor]:
        out = ffpa_attn_func(*leaves, attn_mask=mask, enable_gqa=True, backend=backend)
        return list(torch.autograd.grad(out, leaves, upstream))

    first = run()
    for _ in range(19):
        assert all(torch.equal(got, want) for got, want in zip(run(), first, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_scratch_stays_within_the_workspace(forced, backend):
    config = ffpa_hf.TritonBackend(workspace_mb=64)
    leaves = [randn(1, 4, 8192, 512, grad=True) for _ in range(3)]
    upstream = randn(1, 4, 8192, 512)
    out = ffpa_attn_func(*leaves, backend=config)
    out.backward(upstream)  # compile and warm up
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = ffpa_attn_func(*leaves, backend=config)
    torch.autograd.grad(out, leaves, upstream)
    peak = torch.cuda.max_memory_allocated() - before
    tensors = 8 * leaves[0].numel() * 2  # out, three gradients in fp32 at worst, row statistics
    assert peak < tensors + 72 * 2**20


@pytest.mark.parametrize("backend", BACKENDS)
def test_gqa_and_sdpa_fallback_never_hold_the_scores(backend):
    query, key, value = randn(1, 8, 8192, 512), randn(1, 4, 8192, 512), randn(1, 4, 8192, 512)
    for name in (ffpa_hf.TritonBackend(workspace_mb=128) if backend == "triton" else backend, "sdpa"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ffpa_attn_func(query, key, value, enable_gqa=True, backend=name)
        assert (
            torch.cuda.max_memory_allocated() - before < 8192 * 8192 * 2 * 8 // 2
        )  # half of what bf16 scores would take


MASKS = ["bool", "minus infinity", "finite minimum", "fp32 finite minimum", "key padding"]


@pytest.mark.parametrize("backend", ["sdpa", *BACKENDS, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 256, 512])
@pytest.mark.parametrize("kind", MASKS)
def test_rows_without_keys_and_finite_minima(backend, dtype, head_dim, kind):
    length = 576
    keep = torch.rand(2, 1, length, length, device="cuda") > 0.3
    keep[1, :, :7] = False
    if kind == "key padding":
        keep = keep[:, :, 20:21].clone()
        keep[1] = False
    low = {"finite minimum": torch.finfo(dtype).min, "fp32 finite minimum": torch.finfo(torch.float32).min}
    mask: Tensor = keep
    if kind == "minus infinity":
        mask = torch.zeros_like(keep, dtype=dtype).masked_fill(~keep, -torch.inf)
    elif kind in low:
        mask = torch.zeros_like(keep, dtype=torch.float32 if "fp32" in kind else dtype).masked_fill(~keep, low[kind])
    leaves = [randn(2, 4, length, head_dim, dtype=dtype, grad=True) for _ in range(3)]
    upstream = randn(2, 4, length, head_dim, dtype=dtype)
    out = ffpa_attn_func(*leaves, attn_mask=mask, backend=backend)
    got = [out, *torch.autograd.grad(out, leaves, upstream)]

    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    scores = doubles[0] @ doubles[1].transpose(-1, -2) / math.sqrt(head_dim)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    exact_out = weights @ doubles[2]
    want = [exact_out, *torch.autograd.grad(exact_out, doubles, upstream.double())]
    for name, have, expected in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert torch.isfinite(have).all(), name
        assert error(have, expected) < (2e-2 if dtype == torch.bfloat16 else 4e-3), name
        if dead.any() and name in ("out", "dq"):
            assert (have.masked_select(dead.expand_as(have)) == 0).all(), name


@pytest.mark.parametrize("backend", ["sdpa", *BACKENDS])
@pytest.mark.parametrize("kv_len", [576, 577, 578, 607])
def test_expanded_keys_with_a_mask(backend, kv_len):
    query = randn(1, 8, 600, 512)
    key, value = (randn(1, 1, kv_len, 512).expand(1, 8, kv_len, 512) for _ in range(2))
    mask = torch.rand(1, 1, 600, kv_len, device="cuda") > 0.2
    out = ffpa_attn_func(query, key, value, attn_mask=mask, backend=backend)
    assert error(out, exact(query, key, value, ~mask)) < 1e-2


@pytest.mark.parametrize("backend", ["sdpa", *BACKENDS])
def test_autocast_casts_inputs_and_never_masks(backend):
    query, key = randn(1, 2, 600, 128, dtype=torch.float32), randn(1, 2, 600, 128, dtype=torch.float32)
    value = randn(1, 2, 600, 128)
    mask = torch.where(torch.rand(600, 600, device="cuda") > 0.5, 0.0, -1e9)
    with torch.autocast("cuda", torch.float16):
        out = ffpa_attn_func(query, key, value.float(), attn_mask=mask, backend=backend)
    assert out.dtype == torch.float16
    halves = [t.half() for t in (query, key, value)]
    assert error(out, exact(*halves, mask != 0)) < 5e-3


def test_import_starts_no_cuda_context():
    code = "import ffpa_hf, torch; assert not torch.cuda.is_initialized()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_forward_and_backward_equal_eager(backend):
    leaves = [randn(1, 4, 640, 128, grad=True) for _ in range(3)]
    upstream = randn(1, 4, 640, 128)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ffpa_attn_func(query * 1.0, key, value, is_causal=True, backend=backend)

    compiled = torch.compile(attention, fullgraph=True)
    for got, want in zip(
        torch.autograd.grad(compiled(*leaves), leaves, upstream),
        torch.autograd.grad(attention(*leaves), leaves, upstream),
        strict=True,
    ):
        assert error(got, want) < 1e-5


def test_auto_serves_wide_heads_by_a_kernel_and_never_warns(recwarn):
    query, key, value = (randn(1, 4, 2048, 512) for _ in range(3))
    out = ffpa_attn_func(query, key, value)
    assert ffpa_hf.explain(query, key, value).forward == "triton"
    assert error(out, exact(query, key, value)) < 1e-2
    assert not [w for w in recwarn if issubclass(w.category, ffpa_hf.FallbackWarning)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256, 320, 384, 448, 512, 640, 768, 1024])
def test_error_is_at_most_twice_that_of_sdpa(forced, backend, head_dim):
    leaves = [randn(1, 2, 700, head_dim, grad=True) for _ in range(3)]
    upstream = randn(1, 2, 700, head_dim)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_out = F.scaled_dot_product_attention(*doubles, is_causal=True)
    want = [exact_out, *torch.autograd.grad(exact_out, doubles, upstream.double())]

    def run(name: str) -> list[Tensor]:
        out = ffpa_attn_func(*leaves, is_causal=True, backend=name)
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    for label, ours, theirs, true in zip(("out", "dq", "dk", "dv"), run(backend), run("sdpa"), want, strict=True):
        assert error(ours, true) <= 2 * error(theirs, true) + 1e-4, label
