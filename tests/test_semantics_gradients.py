"""Log-sum-exp, gradients, dtypes under autocast, and dropout, the same for every backend."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from oracle import BACKENDS, DEVICE, KERNELS, SDPA, Served, across, assert_close, compare, truth
from torch.utils.checkpoint import checkpoint

from ffpa_hf import ffpa_attn_func
from ffpa_hf.kernels.sdpa import run as sdpa_run

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kernel = pytest.mark.parametrize("backend", KERNELS)
SDPA_ONLY = pytest.mark.parametrize("backend", SDPA)
N = 10


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


@every_backend
def test_an_exported_program_has_the_attention_as_one_op(backend: Served):
    class Layer(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return backend(query=query, key=key, value=value)

    with torch.no_grad():
        first, second = (tuple(backend.qkv().values()) for _ in range(2))
        program = torch.export.export(Layer(), first)
        names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        op = "aten.scaled_dot_product_attention" if backend.name == "sdpa" else "ffpa.flash_attn_forward"
        assert sum(name.startswith(op) for name in names) == 1, names
        assert torch.equal(program.module()(*second), Layer()(*second))


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
