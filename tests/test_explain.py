"""explain() against a spy: what it says runs is what runs, and saying so runs nothing."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle import DEVICE, KERNELS, Served
from torch.overrides import TorchFunctionMode

import ffpa_hf
from ffpa_hf import Plan, RowIntervals, explain, ffpa_attn_func, ops, settings
from ffpa_hf.kernels.sdpa import run as sdpa_run


class Spy:
    """Who was called: "F.sdpa", "composite", or a kernel's name; backward ones with "backward " before it."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[str] = []
        sdpa, composite, kernel = F.scaled_dot_product_attention, sdpa_run._composite, ops._kernel

        def noting(name, function):
            def call(*args, **keywords):
                self.seen.append(name)
                return function(*args, **keywords)

            return call

        class Module:
            def __init__(self, name: str) -> None:
                self.forward = noting(name, kernel(name).forward)
                self.backward = noting(f"backward {name}", kernel(name).backward)

        monkeypatch.setattr(F, "scaled_dot_product_attention", noting("F.sdpa", sdpa))
        monkeypatch.setattr(sdpa_run, "_composite", noting("composite", composite))
        monkeypatch.setattr(ops, "_kernel", Module)


@pytest.fixture
def spy(monkeypatch) -> Spy:
    return Spy(monkeypatch)


def agree(plan: Plan, spy: Spy) -> None:
    """The forward that ran is the one the plan names."""
    if plan.forward == "sdpa":
        assert spy.seen == ["composite" if plan.composite else "F.sdpa"]
    else:
        assert spy.seen == [plan.forward]


def tensors(dtype=torch.float32, rows=16, width=64, heads=2, kv_heads=2):
    query = torch.randn(1, heads, rows, width, dtype=dtype, device=DEVICE)
    key = torch.randn(1, kv_heads, rows, width, dtype=dtype, device=DEVICE)
    return query, key, torch.randn_like(key)


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.ones(16, 16, dtype=torch.bool, device=DEVICE)},
    "float": {"attn_mask": torch.zeros(16, 16, dtype=torch.float16, device=DEVICE)},
    "float32": {"attn_mask": torch.zeros(16, 16, device=DEVICE)},
    "intervals": {"attn_mask": RowIntervals.causal(16, 16, DEVICE)},
    "dropout": {"dropout_p": 0.2},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.zeros(2, device=DEVICE)},
    "lse": {"return_lse": True},
    "scale": {"scale": 0.5},
}


@pytest.mark.parametrize("backend", [None, "auto", "sdpa", "triton"])
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("forced", [False, True], ids=["usual", "forced"])
def test_what_explain_says_is_what_runs(backend, kind, forced, spy):
    args = tensors(torch.float16)
    with settings.override(force_no_sdpa_fallback=forced), warnings.catch_warnings():
        warnings.simplefilter("ignore", ffpa_hf.FallbackWarning)
        plan = explain(*args, **CALLS[kind], backend=backend)
        assert spy.seen == []  # explaining computes nothing
        assert plan.error is None
        ffpa_attn_func(*args, **CALLS[kind], backend=backend)
    agree(plan, spy)
    if forced and backend != "sdpa":
        assert plan.forward == "triton"
    elif not forced and kind in ("softcap", "sinks", "lse", "float32") and backend != "triton":
        if DEVICE.type == "cuda" and backend != "sdpa":  # auto has kernels for what F.sdpa cannot express
            assert plan.forward == "triton"
            return
        assert plan.composite and "plain torch" in str(plan)


@pytest.mark.parametrize("backend", [None, "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [40, 64, 320, 1040])
def test_explain_is_right_for_every_dtype_and_head_dim(backend, dtype, width, spy):
    args = tensors(dtype, width=width)
    plan = explain(*args, backend=backend)
    ffpa_attn_func(*args, backend=backend)
    if DEVICE.type == "cpu":
        assert plan.forward == "sdpa"
    agree(plan, spy)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("backward", [None, "sdpa"])
def test_the_backward_that_explain_names_is_the_one_that_runs(backend: Served, backward, spy):
    args = [tensor.requires_grad_() for tensor in tensors(backend.dtype)]
    with backend.forced():
        plan = explain(*args, forward_backend=backend.name, backward_backend=backward)
        ffpa_attn_func(*args, forward_backend=backend.name, backward_backend=backward).sum().backward()
    assert plan.forward == backend.name and plan.backward == (backward or backend.name)
    assert spy.seen[:2] == [backend.name, f"backward {plan.backward}"]
    assert plan.backward != "sdpa" or spy.seen[2:] == ["F.sdpa"]


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "triton"},
        {"backend": "cuda"},
        {"backend": "cute", "dropout_p": 0.1},
        {"forward_backend": "sdpa", "backward_backend": "triton"},
        {"backend": "cuda", "softcap": 2.0},
        {"backward_backend": "triton"},
    ],
)
def test_what_would_raise_is_explained_as_what_it_raises(options, spy):
    args = tensors(torch.float64)
    plan = explain(*args, **options)
    assert plan.error is not None and plan.forward == "none"
    with pytest.raises(type(plan.error)) as raised:
        ffpa_attn_func(*args, **options)
    assert str(raised.value) == str(plan.error) and spy.seen == []
    assert f"raises {type(plan.error).__name__}: {plan.error}" in str(plan)


def test_an_error_can_be_raised_again_and_again():
    args = tensors(torch.float64)
    raised = []
    for _ in range(2):
        with pytest.raises(TypeError) as caught:
            ffpa_attn_func(*args, backend="triton")
        raised.append(caught.value)
    assert raised[0] is not raised[1]  # no traceback grows on a remembered one


@pytest.mark.parametrize(
    "options, error",
    [({"dropout_p": 2.0}, ValueError), ({"backend": "x"}, ValueError), ({"softcap": -1.0}, ValueError)],
)
def test_arguments_without_sense_raise_in_explain_too(options, error):
    with pytest.raises(error):
        explain(*tensors(), **options)


def test_explain_takes_the_arguments_of_the_call():
    assert inspect.signature(explain).parameters == inspect.signature(ffpa_attn_func).parameters


def test_explain_sees_what_autocast_will_make_of_the_inputs():
    args = tensors()
    with torch.autocast(DEVICE.type, dtype=torch.float16):
        assert explain(*args).call.dtype == torch.float16
    assert explain(*args).call.dtype == torch.float32


def test_explain_neither_warns_nor_counts(recwarn):
    plan = explain(*tensors(torch.float16), backend="cute")
    assert plan.forward == "sdpa" and plan.fallback is not None
    assert not recwarn.list and len(ffpa_hf.report()) == 0


def test_explain_does_not_touch_the_generator():
    args = tensors()
    before = torch.get_rng_state()
    explain(*args, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_paragraph_tells_shapes_device_and_every_backend():
    query, key, value = tensors(torch.float16, heads=4, kv_heads=2)
    text = str(explain(query, key, value, is_causal=True, enable_gqa=True, softcap=2.0))
    assert "B1 H4:2 N16 D64 float16 causal softcap 2" in text
    for name in ("triton", "cuda", "cute", "sdpa"):
        assert f"\n  {name}" in text
    assert "forward" in text and "backward" in text


def test_a_function_mode_sees_f_sdpa_and_may_replace_it():
    class Seen(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            Seen.calls += function is F.scaled_dot_product_attention
            return function(*args, **(kwargs or {}))

    args = tensors()
    with Seen():
        ffpa_attn_func(*args)
        ffpa_attn_func(*args, CALLS["bool"]["attn_mask"], backend="sdpa")
    assert Seen.calls == 2


def test_torchs_own_function_is_never_replaced():
    original = torch._C._nn.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is original
    ffpa_attn_func(*tensors())
    assert F.scaled_dot_product_attention is original
