"""The operators: what torch checks of every operator, what compilers rely on, and the strings that carry configs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from oracle import DEVICE, HAS_GPU, KERNELS, Served, assert_close, truth
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ffpa_hf
from ffpa_hf import CUDABackend, CuTeDSLBackend, RowIntervals, SDPABackend, TritonBackend, ffpa_attn_func, ops
from ffpa_hf.ops import decode, encode

every_kernel = pytest.mark.parametrize("backend", KERNELS)

FORWARD = torch.ops.ffpa.flash_attn_forward.default
BACKWARD = torch.ops.ffpa.flash_attn_backward.default
#: The arguments that are tensors, then the scalars, in schema order.
TENSORS = (
    "query", "key", "value", "mask", "bias", "row_start", "row_end", "key_mask", "block_start", "block_end", "sinks",
    "rng_state",
)  # fmt: skip


def arguments(backend: Served, kind: str, *, grad: bool = True) -> tuple:
    """Operator arguments without the two config strings."""
    tensors: dict[str, Tensor] = backend.qkv(2, 2, 6, 6)
    tensors |= {name: None for name in TENSORS if name not in tensors}
    scale, causal, dropout, softcap = 0.125, False, 0.0, None
    if kind == "causal":
        causal = True
    elif kind == "bool":
        tensors["mask"] = torch.ones(1, 1, 6, 6, dtype=torch.bool, device=DEVICE).tril()
    elif kind == "bias":
        tensors["bias"] = backend.randn(1, 2, 6, 6)
    elif kind == "intervals":
        intervals = RowIntervals.sliding_window(6, 6, 3, DEVICE)
        tensors["row_start"], tensors["row_end"] = intervals.start, intervals.end
        tensors["key_mask"] = torch.tensor([[True] * 5 + [False]], device=DEVICE)
        tensors["block_start"], tensors["block_end"] = intervals.query_ranges(6)
    elif kind == "sinks and softcap":
        tensors["sinks"], softcap = torch.zeros(2, device=DEVICE), 3.0
    elif kind == "dropout":
        tensors["rng_state"], dropout = torch.tensor([3, 5], device=DEVICE), 0.25
    elif kind == "grouped heads":
        tensors["key"], tensors["value"] = (tensors[name][:, :1] for name in ("key", "value"))
    elif kind == "transposed":
        for name in ("query", "key", "value"):
            tensors[name] = backend.randn(2, 6, 2, 64).transpose(1, 2)
    elif kind == "width first":
        for name in ("query", "key", "value"):
            tensors[name] = backend.randn(2, 2, 64, 6).transpose(2, 3)
    elif kind == "unaligned":
        for name in ("query", "key", "value"):
            tensors[name] = backend.randn(2, 6, 2, 65).transpose(1, 2)[..., 1:]
    elif kind == "expanded":
        tensors["key"], tensors["value"] = (tensors[name][:1, :1].expand(2, 2, 6, 64) for name in ("key", "value"))
    if grad:
        for name in ("query", "key", "value", "bias", "sinks"):
            if tensors[name] is not None:
                tensors[name] = tensors[name].detach().requires_grad_()
    return (*(tensors[name] for name in TENSORS), scale, causal, dropout, softcap)


KINDS = [
    "plain", "causal", "bool", "bias", "intervals", "sinks and softcap", "dropout", "grouped heads", "transposed",
    "width first", "unaligned", "expanded",
]  # fmt: skip
QUICK = {"plain", "bias", "transposed", "width first", "unaligned", "expanded"}
CASES = [
    pytest.param(one.values[0], kind, id=f"{one.id}-{kind}",
                 marks=(*one.marks, *(() if HAS_GPU or kind in QUICK else (pytest.mark.slow,))))
    for one in KERNELS for kind in KINDS
]  # fmt: skip


@pytest.mark.parametrize("backend, kind", CASES)
def test_torch_finds_no_fault_with_the_forward_operator(backend: Served, kind):
    torch.library.opcheck(FORWARD, (*arguments(backend, kind), backend.name, backend.name), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("backend, kind", CASES)
def test_torch_finds_no_fault_with_the_backward_operator(backend: Served, kind):
    call = arguments(backend, kind, grad=False)
    out, lse, stats = FORWARD(*call, backend.name, backend.name)
    needs = [True, True, True, call[4] is not None, call[10] is not None]
    tests = ("test_schema", "test_faketensor")  # a second derivative raises by design
    for grad_lse in (None, torch.randn_like(lse)):
        torch.library.opcheck(
            BACKWARD, (torch.randn_like(out), grad_lse, out, lse, stats, *call, needs, backend.name), test_utils=tests
        )


@every_kernel
@pytest.mark.parametrize("kind", ["plain", "transposed", "width first", "unaligned", "bias", "expanded"])
def test_a_recomputing_backward_has_the_strides_that_were_promised(backend: Served, kind):
    call = arguments(backend, kind, grad=False)
    out, lse, stats = FORWARD(*call, backend.name, "sdpa")
    torch.library.opcheck(
        BACKWARD,
        (torch.randn_like(out), None, out, lse, stats, *call, [True, True, True, call[4] is not None, False], "sdpa"),
        test_utils=("test_schema", "test_faketensor"),
    )


@every_kernel
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_recomputing_backward_gives_the_right_gradients(backend: Served, with_lse):
    tensors = {name: tensor.requires_grad_() for name, tensor in backend.qkv(1, 2, 6, 9).items()}
    bias = backend.randn(1, 1, 6, 9).requires_grad_()
    sinks = backend.randn(2, dtype=torch.float32).requires_grad_()
    with backend.forced():
        result = ffpa_hf.ffpa_attn_func(
            **tensors, attn_mask=bias, sinks=sinks, return_lse=with_lse,
            forward_backend=backend.name, backward_backend="sdpa",
        )  # fmt: skip
    outputs = result if with_lse else (result,)
    leaves = [*tensors.values(), bias, sinks]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = truth(*exact)[: len(outputs)]
    seeds = [torch.randn_like(output) for output in outputs]
    found = torch.autograd.grad(outputs, leaves, seeds)
    wanted = torch.autograd.grad(expected, exact, [seed.double() for seed in seeds])
    for name, gradient, exact_gradient in zip((*tensors, "bias", "sinks"), found, wanted, strict=True):
        assert_close(gradient, exact_gradient, backend.dtype, name)


@every_kernel
def test_only_the_gradients_that_are_needed_are_computed(backend: Served, monkeypatch):
    seen = []
    kernel = ops._kernel

    class Module:
        def __init__(self, name):
            self.forward = kernel(name).forward

        def backward(self, *args):
            seen.append(args[6])
            return kernel(backend.name).backward(*args)

    monkeypatch.setattr(ops, "_kernel", Module)
    tensors = backend.qkv()
    tensors["value"].requires_grad_()
    backend(**tensors).sum().backward()
    assert seen == [(False, False, True, False, False)]


def test_operator_names_are_what_selective_checkpointing_looks_for():
    assert "flash_attn" in str(FORWARD) and "flash_attn" in str(BACKWARD)


@every_kernel
def test_selective_checkpointing_can_keep_the_attention(backend: Served):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    seen = []

    def policy(context, operator, *args, **keywords):
        seen.append(operator)
        return CheckpointPolicy.MUST_SAVE if operator is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    tensors = [tensor.requires_grad_() for tensor in backend.qkv().values()]
    with backend.forced():
        out = checkpoint(
            lambda *args: ffpa_hf.ffpa_attn_func(*args, backend=backend.name).sin(),
            *tensors,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        found = torch.autograd.grad(out.sum(), tensors)
        expected = torch.autograd.grad(ffpa_hf.ffpa_attn_func(*tensors, backend=backend.name).sin().sum(), tensors)
    assert FORWARD in seen
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@every_kernel
def test_without_a_gradient_the_autograd_wrapper_is_skipped(backend: Served):
    tensors = backend.qkv()
    assert backend(**tensors).grad_fn is None
    tensors["query"].requires_grad_()
    assert "flash_attn_forward" in type(backend(**tensors).grad_fn).__name__


class Watch(TorchDispatchMode):
    """Every operator that passes the dispatcher."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(operator)
        return operator(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


@every_kernel
@pytest.mark.parametrize("mask", [None, "bias"])
def test_a_call_gives_the_same_bits_whether_watched_or_not(backend: Served, mask):
    tensors = backend.qkv(1, 2, 6, 9)
    if mask is not None:
        tensors["attn_mask"] = backend.randn(1, 1, 6, 9)
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]

    def run():
        with torch.no_grad():
            free = backend(**tensors)
        out, lse = backend(**tensors, return_lse=True)
        return [free, out, lse, *torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))]

    alone = run()
    with Watch() as watch:
        watched = run()
    assert watch.seen.count(FORWARD) == 2 and watch.seen.count(BACKWARD) == 1
    assert all(torch.equal(one, other) for one, other in zip(alone, watched, strict=True))


@every_kernel
def test_a_profiler_sees_the_operators(backend: Served):
    tensors = [tensor.requires_grad_() for tensor in backend.qkv().values()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
        backend(*tensors).sum().backward()
    names = {event.key for event in watched.key_averages()}
    assert {"ffpa::flash_attn_forward", "ffpa::flash_attn_backward"} <= names


def test_the_dispatcher_is_left_out_only_where_nobody_watches():
    tensor = torch.zeros(2)
    answers = []

    def ask(given: Tensor) -> Tensor:
        answers.append(ops._unwatched((tensor, None, given)))
        return given + 1

    ask(tensor)
    ask(torch.nn.Parameter(tensor))
    assert answers == [True, True]
    ask(tensor.as_subclass(Subclass))
    with Watch():
        ask(tensor)
    with torch.device("cpu"):  # a function mode
        ask(tensor)
    torch.vmap(ask)(tensor)
    torch.func.grad(lambda given: ask(given).sum())(tensor)
    torch.jit.trace(ask, (tensor,), check_trace=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        ask(tensor)
    assert answers == [True, True] + [False] * 7


# --- strings that carry configs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        SDPABackend(),
        TritonBackend(),
        TritonBackend(autotune=True, autotune_mode="max", workspace_mb=7),
        CUDABackend(),
        CUDABackend(family="native", acc="f16", smooth_k=False, hybrid=True),
        CUDABackend(enable_fp8=True, qk="int8", hybrid=False, smooth_v=True),
        CUDABackend(enable_fp4=True),
        CuTeDSLBackend(target="sm_100a", workspace_mb=3),
    ],
    ids=repr,
)
def test_a_config_comes_back_out_of_its_string(config):
    text = encode(config)
    assert isinstance(text, str) and decode(text) == config and type(decode(text)) is type(config)


@pytest.mark.parametrize("name", ["sdpa", "triton", "cuda", "cute"])
def test_the_string_of_a_default_config_is_its_name(name):
    from ffpa_hf.backends import NAMES

    assert encode(NAMES[name]) == name


# --- torch.compile ----------------------------------------------------------------------------------------------------

COMPILED = """
import sys
import torch
from torch._dynamo.backends.common import aot_autograd
import ffpa_hf
from ffpa_hf import RowIntervals, ffpa_attn_func, ffpa_attn_varlen_func

kind, backend, device = sys.argv[1:4]
backend = None if backend == "auto" else backend
graphs = 0
counted = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward)

def compiler(graph, inputs):
    global graphs
    graphs += 1
    return counted(graph, inputs)

def attention(query, key, value, bias):
    options = {"backend": backend}
    rows, keys = query.shape[2], key.shape[2]
    if kind == "plain":
        return ffpa_attn_func(query, key, value, **options)
    if kind == "causal":
        return ffpa_attn_func(query, key, value, is_causal=True, enable_gqa=True, **options)
    if kind == "bias":
        return ffpa_attn_func(query, key, value, bias[None, None, None, :keys], **options)
    if kind == "lse":
        out, lse = ffpa_attn_func(query, key, value, softcap=5.0, return_lse=True, **options)
        return out * lse[..., None].to(out.dtype)
    if kind == "window":
        window = RowIntervals.sliding_window(rows, keys, 5, query.device)
        return ffpa_attn_func(query, key, value, window, **options)
    if kind == "varlen":
        cu = torch.tensor([0, 3], device=query.device, dtype=torch.int32)
        packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return ffpa_attn_varlen_func(*packed, cu, cu, 3, 3, causal=True, **options)
    raise AssertionError(kind)

dtype = torch.float32 if backend in (None, "sdpa") or device == "cpu" else torch.float16
heads = 1 if kind == "causal" else 2
compiled = torch.compile(attention, backend=compiler, fullgraph=True)
graphs_after = []
for rows in (24, 72, 140):
    query = torch.randn(1, 2, rows, 64, dtype=dtype, device=device, requires_grad=True)
    key, value = (torch.randn(1, heads, rows, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    bias = torch.randn(200, dtype=dtype, device=device, requires_grad=True)
    leaves = [query, key, value] + ([bias] if kind == "bias" else [])
    out = compiled(query, key, value, bias)
    found = torch.autograd.grad(out.sin().sum(), leaves)
    expected = attention(query, key, value, bias)
    wanted = torch.autograd.grad(expected.sin().sum(), leaves)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=2e-3)
    assert out.stride() == expected.stride(), (out.stride(), expected.stride())
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=2e-3)
    graphs_after.append(graphs)
print("GRAPHS", graphs_after)
print("COUNTED", ffpa_hf.report().backends())
assert graphs_after[-1] <= 2, graphs_after  # the first, and at most one more for every other length
"""


def compiled(kind: str, backend: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"FFPA_ALLOW_UNQUALIFIED": "1"}
    environment |= {} if HAS_GPU else {"TRITON_INTERPRET": "1"}
    environment |= {"FFPA_FORCE_NO_SDPA_FALLBACK": "1"} if backend == "triton" else {}
    return subprocess.run(
        [sys.executable, "-c", COMPILED, kind, backend, DEVICE.type], capture_output=True, text=True, env=environment
    )


DAILY = {("plain", "auto"), ("bias", "sdpa"), ("window", "triton"), ("varlen", "auto")}


@pytest.mark.parametrize(
    "kind, backend",
    [
        pytest.param(kind, backend, marks=() if HAS_GPU or (kind, backend) in DAILY else pytest.mark.slow)
        for kind in ("plain", "causal", "bias", "lse", "window", "varlen")
        for backend in ("auto", "sdpa", "triton")
    ],
)
def test_a_cold_compile_of_the_whole_graph_runs_both_ways_and_recompiles_at_most_once(kind, backend):
    done = compiled(kind, backend)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GRAPHS" in done.stdout and "FallbackWarning" not in done.stderr
    # Only the plain calls are counted, three of them; compiled ones add nothing to the hot path.
    name, calls = done.stdout.split("COUNTED {")[1].strip(" }\n").split(": ")
    assert calls == "3" and (backend == "auto" or name == f"'{backend}'")


def test_a_traced_call_is_the_attention_of_other_inputs_too():
    example, other = (tuple(torch.randn(1, 2, 6, 64, device=DEVICE) for _ in range(3)) for _ in range(2))
    traced = torch.jit.trace(lambda query, key, value: ffpa_attn_func(query, key, value, is_causal=True), example)
    torch.testing.assert_close(traced(*other), torch.nn.functional.scaled_dot_product_attention(*other, is_causal=True))


@pytest.mark.parametrize("backend", KERNELS)
def test_functional_and_batched_gradients_of_kernels_are_refused_in_our_words(backend: Served):
    tensors = [backend.randn(1, 1, 6, 64).requires_grad_() for _ in range(3)]
    with backend.forced(), pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.grad(lambda query: ffpa_attn_func(query, *tensors[1:], backend=backend.name).float().sum())(
            tensors[0]
        )
    out = backend(*tensors)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(out, tensors, torch.stack([torch.ones_like(out)] * 2), is_grads_batched=True)
