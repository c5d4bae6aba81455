"""What runs: the contract's table row by row, for descriptions of calls on machines that need not be here.

The kernels of this file are stand-ins with the capabilities of the real ones, all of them built and qualified, so that
only the planner is tested.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import pickle
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle import DEVICE, HAS_GPU, KERNELS

import ffpa_hf
from ffpa_hf import (
    CUDABackend,
    CuTeDSLBackend,
    FallbackWarning,
    RowIntervals,
    SDPABackend,
    TritonBackend,
    dispatch,
    explain,
    ffpa_attn_func,
    functional,
    settings,
)
from ffpa_hf.backends import resolve_backend
from ffpa_hf.call import AttentionCall
from ffpa_hf.dispatch import Route, forget_plans, plan
from ffpa_hf.kernels import qualification
from ffpa_hf.kernels.common import Accepted, Capability, refusal, refuse

HALVES = (torch.float16, torch.bfloat16)
CAPABILITIES = {
    "triton": Capability("triton", HALVES, bias_grad=True, dropout=True, softcap=True, sinks=True),
    "cuda": Capability("cuda", HALVES, dropout=True),
    "cute": Capability("cute", HALVES, masks=("none", "bool", "intervals"), bias=False, softcap=True, sinks=True),
}
NAMES = ("triton", "cuda", "cute")


def stand_in(name: str) -> types.SimpleNamespace:
    def supports(call, config=None, *, backward=False):
        return refusal(CAPABILITIES[name], call, backward=backward) or Accepted()

    return types.SimpleNamespace(supports=supports)


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """Every kernel backend exists and is qualified; nothing was measured."""

    for name in NAMES:
        monkeypatch.setitem(dispatch._MODULES, name, (stand_in(name), None))
    monkeypatch.setitem(dispatch._MODULES, "cuda.fp8", (stand_in("cuda"), None))
    monkeypatch.setattr(dispatch.preferences, "prefer", lambda call: None)
    forget_plans()
    with settings.override(allow_unqualified=True):
        yield
    forget_plans()


@pytest.fixture
def unqualified(monkeypatch):
    """No kernel ever ran on this kind of GPU."""
    verdict = types.SimpleNamespace(qualified=False, text="never ran on sm_90")
    monkeypatch.setattr(dispatch.qualification, "verdict", lambda *_: verdict)
    with settings.override(allow_unqualified=False):
        yield


def call(**changes) -> AttentionCall:
    """A call that every kernel serves, on an H200."""
    usual = AttentionCall(
        batch=1, q_heads=8, kv_heads=8, q_len=1024, kv_len=1024, head_dim=512, value_dim=512, dtype=torch.bfloat16,
        device_type="cuda", capability=(9, 0), device_name="NVIDIA H200",
    )  # fmt: skip
    if "head_dim" in changes:
        changes.setdefault("value_dim", changes["head_dim"])
    return dataclasses.replace(usual, **changes)


def explicit(backend, **more) -> Route:
    return Route(backend, **more, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_stand_ins_can_what_the_real_backends_say_they_can(name):
    real = importlib.import_module(f"ffpa_hf.kernels.{name}").CAPABILITY
    assert real == CAPABILITIES[name]  # the rows of the documented table


@pytest.mark.parametrize("needs_grad", [False, True])
def test_cuda_comes_first_where_its_forward_was_the_fastest(monkeypatch, needs_grad):
    monkeypatch.setitem(dispatch._MODULES, "cute", (None, "not here"))
    forget_plans()
    for head_dim, first in ((256, "sdpa"), (264, "cuda"), (320, "cuda"), (384, "cuda"), (392, "triton")):
        for causal in (False, True):
            made = plan(call(head_dim=head_dim, is_causal=causal, needs_grad=needs_grad))
            assert made.forward == first, made
            assert made.backward == ("sdpa" if first == "sdpa" else "triton")
    for other in (
        {"q_len": 1023}, {"kv_len": 512}, {"mask_kind": "intervals"}, {"mask_kind": "bool"}, {"dropout_p": 0.1},
        {"capability": (8, 0)}, {"capability": (10, 0)},
    ):  # fmt: skip
        assert plan(call(head_dim=320, needs_grad=needs_grad, **other)).forward == "triton", other


@pytest.mark.parametrize("preference", [None, "cuda", "triton"])
def test_a_forward_without_a_backward_is_no_choice_for_training(monkeypatch, preference):
    """Where no kernel's backward is to be had, SDPA serves, with a gradient or without: a checkpoint asks for both."""
    for name in ("triton", "cute"):
        monkeypatch.setitem(dispatch._MODULES, name, (None, "it could not build a kernel"))
    forget_plans()
    for needs_grad in (False, True):
        made = plan(call(needs_grad=needs_grad), Route(preference))
        assert (made.forward, made.backward, made.error) == ("sdpa", "sdpa", None), made
    asked = plan(call(needs_grad=True), explicit("cuda"))
    assert isinstance(asked.error, NotImplementedError) and "behind the CUDA forward" in str(asked.error)


# --- an explicit backend ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256, 264, 512, 1024])
def test_a_requested_kernel_runs_at_every_head_dim_it_has(backend, head_dim):
    made = plan(call(head_dim=head_dim), explicit(backend))
    assert (made.forward, made.reason, made.error, made.fallback) == (backend, "asked for", None, None)


@pytest.mark.parametrize("backend", NAMES)
def test_small_head_dims_go_to_sdpa_only_by_switch(backend):
    with settings.override(**{f"{backend}_allow_small_d": False}):
        assert plan(call(head_dim=256), explicit(backend)).forward == "sdpa"
        assert plan(call(head_dim=264), explicit(backend)).forward == backend
        assert f"FFPA_{backend.upper()}_ALLOW_SMALL_D=0" in plan(call(head_dim=256), explicit(backend)).reason
        for other in NAMES:
            if other != backend:
                assert plan(call(head_dim=256), explicit(other)).forward == other


FALLBACKS = {
    "too wide": {"head_dim": 1032},
    "too narrow": {"head_dim": 56},
    "no multiple of 8": {"head_dim": 100},
    "another value width": {"value_dim": 256},
    "three dimensions": {"rank": 3},
    "five dimensions": {"rank": 5},
    "few queries": {"q_len": 511},
    "eight queries": {"q_len": 8},
    "few keys": {"kv_len": 511},
    "decoding over few keys": {"q_len": 1, "kv_len": 511},
    "on a CPU": {"device_type": "cpu", "capability": None, "device_name": "cpu"},
    "on a Mac": {"device_type": "mps", "capability": None, "device_name": "mps"},
    "on an old GPU": {"capability": (7, 5)},
}


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("why", FALLBACKS)
def test_what_a_requested_kernel_leaves_to_sdpa(backend, why):
    made = plan(call(**FALLBACKS[why], needs_grad=True), explicit(backend))
    assert (made.forward, made.backward, made.error) == ("sdpa", "sdpa", None)
    assert made.fallback is not None and made.fallback[0] == backend
    assert backend in made.reason and "SDPA" in made.reason


@pytest.mark.parametrize("q_len", [1, 7])
def test_decoding_keeps_its_kernel_except_in_cute(q_len):
    for backend, expected in (("triton", "triton"), ("cuda", "cuda"), ("cute", "sdpa")):
        assert plan(call(q_len=q_len, kv_len=512), explicit(backend)).forward == expected


@pytest.mark.parametrize("backend", NAMES)
def test_lengths_from_512_on_run_the_kernel(backend):
    assert plan(call(q_len=512, kv_len=512), explicit(backend)).forward == backend


@pytest.mark.parametrize("beyond", [{"softcap": 2.0}, {"has_sinks": True}, {"return_lse": True}])
def test_a_short_call_that_f_sdpa_cannot_express_keeps_its_kernel(beyond):
    assert plan(call(q_len=16, kv_len=16, **beyond), explicit("triton")).forward == "triton"
    if "return_lse" in beyond:
        assert plan(call(q_len=16, kv_len=16, **beyond), explicit("cuda")).forward == "cuda"


def test_sdpa_is_sdpa():
    made = plan(call(), explicit("sdpa"))
    assert (made.forward, made.backward, made.fallback) == ("sdpa", "sdpa", None)


# (changes, backend, exception, what the message must hold)
ERRORS = [
    ({"dtype": torch.float32}, "triton", TypeError, ("query", "float32", "triton", "bfloat16")),
    ({"dtype": torch.float64}, "cuda", TypeError, ("query", "float64", "cuda")),
    ({"dtype": torch.float32}, "cute", TypeError, ("query", "float32", "cute")),
    ({"mask_kind": "additive", "has_bias": True}, "cute", NotImplementedError, ("attn_mask", "additive", "cute")),
    ({"mask_kind": "intervals", "has_bias": True}, "cute", NotImplementedError, ("attn_mask", "bias", "cute")),
    ({"dropout_p": 0.1}, "cute", NotImplementedError, ("dropout_p=0.1", "cute")),
    ({"softcap": 50.0}, "cuda", NotImplementedError, ("softcap=50", "cuda")),
    ({"has_sinks": True}, "cuda", NotImplementedError, ("sinks", "cuda")),
]
WHERE = {
    "usual": {},
    "short": {"q_len": 16, "kv_len": 16},
    "on a CPU": {"device_type": "cpu", "capability": None},
    "narrow": {"head_dim": 40},
    "five dimensions": {"rank": 5},
    "empty": {"q_len": 0},
    "no batch": {"batch": 0},
}


@pytest.mark.parametrize("changes, backend, error, words", ERRORS)
@pytest.mark.parametrize("where", WHERE)
def test_what_a_backend_lacks_raises_whatever_the_size_and_device(changes, backend, error, words, where):
    made = plan(call(**WHERE[where], **changes), explicit(backend))
    assert type(made.error) is error
    assert all(word in str(made.error) for word in words), str(made.error)
    assert made.forward == "none" and made.fallback is None


@pytest.mark.parametrize("changes, backend, error, words", ERRORS)
def test_the_backend_that_a_message_names_would_take_the_call(changes, backend, error, words):
    message = str(plan(call(**changes), explicit(backend)).error)
    named = message.split("backend='")[1].split("'")[0]
    assert plan(call(**changes), explicit(named)).error is None
    assert (named == "sdpa") == ("dtype" in changes)  # a kernel where there is one


def test_an_additive_mask_needs_a_kernel_with_its_gradient_only_where_one_is_wanted():
    wanted = {"mask_kind": "additive", "has_bias": True, "bias_dtype": torch.bfloat16}
    both = {"forward_backend": "cuda", "backward_backend": "cute"}
    made = plan(call(**wanted, bias_needs_grad=True, needs_grad=True), Route(**both, strict=True))
    assert isinstance(made.error, NotImplementedError)
    assert plan(call(**wanted, bias_needs_grad=True, needs_grad=True), explicit("triton")).error is None


@pytest.mark.parametrize("backend", NAMES)
def test_an_unqualified_kernel_raises_and_names_the_selftest(backend, unqualified):
    made = plan(call(), explicit(backend))
    assert type(made.error) is RuntimeError and "ffpa-hf selftest" in str(made.error) and "sm_90" in str(made.error)


@pytest.mark.parametrize("why", FALLBACKS)
def test_reasons_for_sdpa_come_before_qualification(why, unqualified):
    assert plan(call(**FALLBACKS[why]), explicit("triton")).forward == "sdpa"


@pytest.mark.parametrize("changes, backend, error, words", ERRORS)
def test_argument_errors_come_before_qualification(changes, backend, error, words, unqualified):
    assert type(plan(call(**changes), explicit(backend)).error) is error


def test_unqualified_kernels_run_when_allowed(unqualified):
    with settings.override(allow_unqualified=True):
        assert plan(call(), explicit("triton")).forward == "triton"


def test_auto_leaves_unqualified_kernels_out(unqualified):
    made = plan(call())
    assert made.forward == "sdpa" and made.error is None and made.fallback is None
    assert "never ran on sm_90" in str(made)


# --- pairs ------------------------------------------------------------------------------------------------------------

PAIRS = [
    ("sdpa", "sdpa", True),
    ("sdpa", "triton", False),
    ("sdpa", "cute", False),
    ("triton", "triton", True),
    ("triton", "cute", True),
    ("triton", "sdpa", True),
    ("cute", "cute", True),
    ("cute", "triton", True),
    ("cute", "sdpa", True),
    ("cuda", "triton", True),
    ("cuda", "cute", True),
    ("cuda", "sdpa", True),
    ("cuda-fp8", "triton", True),
    ("cuda-fp8", "cute", True),
    ("cuda-fp8", "sdpa", False),
    ("cuda-fp4", "sdpa", False),
]


@pytest.mark.parametrize("forward, backward, allowed", PAIRS)
def test_which_backward_may_stand_behind_which_forward(forward, backward, allowed):
    for sizes in ({}, {"q_len": 16}, {"q_len": 0}):
        made = plan(call(needs_grad=True, **sizes), Route(None, forward, backward, strict=True))
        if not allowed:
            assert isinstance(made.error, ValueError), sizes
            assert forward.split("-")[0] in str(made.error) and backward in str(made.error)
        elif not sizes:
            assert (made.forward, made.backward) == (forward.split("-")[0], backward)


@pytest.mark.parametrize("backend", ["cuda", "cuda-fp8", CUDABackend()])
def test_cuda_has_no_backward(backend):
    with pytest.raises(ValueError, match="the CUDA backend has no backward"):
        Route(None, None, backend)


@pytest.mark.parametrize(
    "forward, backward", [("sdpa", "sdpa"), ("triton", "triton"), ("cute", "cute"), ("cuda", "cute")]
)
def test_the_backward_that_comes_with_a_forward(forward, backward):
    assert plan(call(needs_grad=True), explicit(forward)).backward == backward
    assert plan(call(needs_grad=True), Route(None, forward, strict=True)).backward == backward


def test_behind_cuda_comes_triton_where_cute_refuses(unqualified):
    with settings.override(allow_unqualified=True):
        made = plan(call(needs_grad=True, dropout_p=0.1), explicit("cuda"))
    assert (made.forward, made.backward) == ("cuda", "triton")


@pytest.mark.parametrize("backend", ["cuda-fp8", "cuda-fp4"])
def test_a_quantised_forward_gives_no_gradient_unless_asked(backend):
    made = plan(call(needs_grad=True), explicit(backend))
    assert isinstance(made.error, ValueError) and "gradient" in str(made.error) and "triton" in str(made.error)
    assert plan(call(needs_grad=False), explicit(backend)).forward == "cuda"
    asked = plan(call(needs_grad=True), Route(backend, None, "triton", strict=True))
    assert (asked.forward, asked.backward) == ("cuda", "triton")


@pytest.mark.parametrize("forward", ["triton", "cuda"])
def test_a_recomputing_backward_refuses_dropout(forward):
    made = plan(call(dropout_p=0.1, needs_grad=True), Route(None, forward, "sdpa", strict=True))
    assert isinstance(made.error, ValueError) and "dropout_p=0.1" in str(made.error)


def test_the_directions_given_one_by_one_win_over_backend():
    made = plan(call(needs_grad=True), Route("triton", "cuda", None, strict=True))
    assert (made.forward, made.backward) == ("cuda", "triton")
    made = plan(call(needs_grad=True), Route("triton", None, "cute", strict=True))
    assert (made.forward, made.backward) == ("triton", "cute")


@pytest.mark.parametrize("backward", ["triton", "cute", "sdpa"])
def test_only_a_backward_given_lets_auto_pick_a_forward_that_pairs(backward):
    made = plan(call(needs_grad=True), Route(None, None, backward, strict=True))
    assert made.error is None and made.backward == backward and made.forward in NAMES
    small = plan(call(head_dim=128, needs_grad=True), Route(None, None, backward, strict=True))
    assert small.backward == backward and (small.forward == "sdpa") == (backward == "sdpa")


def test_a_sdpa_backward_and_dropout_leave_only_the_sdpa_forward():
    made = plan(call(dropout_p=0.1, needs_grad=True), Route(None, None, "sdpa", strict=True))
    assert (made.forward, made.backward, made.error) == ("sdpa", "sdpa", None)


@pytest.mark.parametrize("where", WHERE)
def test_only_a_backward_given_raises_for_what_it_lacks_wherever_it_is(where):
    if where in ("empty", "no batch"):
        where = "usual"
    made = plan(call(dtype=torch.float32, **WHERE[where]), Route(None, None, "triton", strict=True))
    assert type(made.error) is TypeError


@pytest.mark.parametrize("why", ["too wide", "on a CPU", "another value width"])
def test_only_a_backward_given_that_cannot_run_here_is_a_fallback(why):
    made = plan(call(**FALLBACKS[why], needs_grad=True), Route(None, None, "triton", strict=True))
    assert (made.forward, made.backward, made.error) == ("sdpa", "sdpa", None)
    assert made.fallback is not None and made.fallback[0] == "triton"


# --- auto -------------------------------------------------------------------------------------------------------------


def test_auto_unmeasured_keeps_sdpa_up_to_256():
    assert plan(call(head_dim=256)).forward == "sdpa"
    assert plan(call(head_dim=64)).forward == "sdpa"


def test_auto_unmeasured_takes_kernels_above_256():
    assert plan(call(head_dim=264)).forward == "cute"
    assert plan(call(dropout_p=0.1)).forward == "triton"
    assert plan(call(dropout_p=0.1, softcap=2.0)).forward == "triton"
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert plan(call(capability=capability)).forward == "triton"


def test_auto_has_no_short_sequence_rule():
    assert plan(call(q_len=16, kv_len=16)).forward == "cute"


@pytest.mark.parametrize(
    "why", ["too wide", "too narrow", "no multiple of 8", "another value width", "on a CPU", "three dimensions"]
)
def test_auto_choosing_sdpa_is_no_fallback(why):
    made = plan(call(**FALLBACKS[why]))
    assert made.forward == "sdpa" and made.fallback is None and made.error is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_auto_serves_dtypes_without_a_kernel(dtype):
    made = plan(call(dtype=dtype, needs_grad=True))
    assert (made.forward, made.error, made.fallback) == ("sdpa", None, None)


def test_auto_takes_a_kernel_for_what_f_sdpa_cannot_express_at_any_head_dim():
    assert plan(call(head_dim=128, return_lse=True)).forward == "cute"
    assert plan(call(head_dim=128, has_sinks=True, dropout_p=0.1)).forward == "triton"


def test_auto_follows_what_was_measured(monkeypatch):
    order = ("sdpa", "triton", "cuda")
    monkeypatch.setattr(dispatch.preferences, "prefer", lambda call: order)
    assert plan(call()).forward == "sdpa"
    order = ("cuda", "triton", "sdpa")
    forget_plans()
    assert plan(call(head_dim=64)).forward == "cuda"
    assert plan(call(head_dim=64, value_dim=128)).forward == "sdpa"
    assert "measured" in plan(call(head_dim=64)).reason


def test_auto_never_quantises():
    for head_dim in (64, 128, 256, 512, 1024):
        for capability in ((8, 9), (9, 0), (12, 0)):
            config = plan(call(head_dim=head_dim, capability=capability)).forward_config
            assert not (isinstance(config, CUDABackend) and config.quantised)


@pytest.mark.parametrize("route", [None, explicit("triton"), Route("cute"), Route(None, None, "triton", strict=True)])
@pytest.mark.parametrize(
    "where",
    [{}, {"head_dim": 128}, {"q_len": 16}, {"has_bias": True, "mask_kind": "additive", "bias_dtype": torch.bfloat16}],
)
def test_the_forward_does_not_depend_on_whether_a_gradient_is_wanted(route, where):
    bias = {"bias_needs_grad": True} if "has_bias" in where else {}
    with_grad, without = plan(call(needs_grad=True, **bias, **where), route), plan(call(**where), route)
    if with_grad.error is None:
        assert (with_grad.forward, with_grad.reason) == (without.forward, without.reason)


def test_the_same_call_gets_the_same_plan_in_any_order():
    calls = [call(head_dim=width, q_len=rows) for width in (64, 264, 512) for rows in (16, 1024)]
    first = [plan(one).forward for one in calls]
    forget_plans()
    assert [plan(one).forward for one in reversed(calls)] == first[::-1]


@pytest.mark.parametrize("name", ["triton", "sdpa", "cuda"])
def test_the_default_backend_is_tried_first_by_auto(name):
    with settings.override(default_backend=name):
        made = plan(call())
        assert made.forward == name and "FFPA_DEFAULT_BACKEND" in made.reason


def test_the_default_backend_is_a_preference():
    with settings.override(default_backend="cute"):
        assert plan(call(dropout_p=0.1)).forward == "triton"  # what cute lacks goes on
        made = plan(call(q_len=16, head_dim=128))  # short: the rule of requested kernels, then auto's own
        assert made.forward == "sdpa" and made.fallback is None and made.error is None
        assert plan(call(), explicit("triton")).forward == "triton"


def test_an_unknown_default_backend_says_which_variable():
    with settings.override(default_backend="fast"), pytest.raises(ValueError, match="FFPA_DEFAULT_BACKEND='fast'"):
        plan(call())


# --- preferences ------------------------------------------------------------------------------------------------------


def test_a_preference_runs_where_it_can():
    made = plan(call(head_dim=128), Route("triton"))
    assert (made.forward, made.reason) == ("triton", "preferred")


@pytest.mark.parametrize("changes, backend, error, words", ERRORS)
def test_a_preference_that_cannot_serve_goes_on_to_the_next(changes, backend, error, words):
    made = plan(call(**changes), Route(backend))
    assert made.error is None and made.fallback is None and made.forward != backend


@pytest.mark.parametrize("why", FALLBACKS)
def test_a_preference_never_warns_of_a_fallback(why):
    made = plan(call(**FALLBACKS[why]), Route("triton"))
    assert made.error is None and made.fallback is None


def test_a_preferred_backward_that_cannot_pair_is_let_go():
    made = plan(call(needs_grad=True, dropout_p=0.1), Route(None, "triton", "sdpa"))
    assert (made.forward, made.backward, made.error) == ("triton", "triton", None)


def test_strict_makes_a_preference_explicit():
    assert plan(call(dtype=torch.float32), Route("triton")).forward == "sdpa"
    assert type(plan(call(dtype=torch.float32), Route("triton", strict=True)).error) is TypeError


# --- never SDPA -------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_fallback():
    with settings.override(force_no_sdpa_fallback=True):
        yield


@pytest.mark.parametrize("why", FALLBACKS)
def test_without_fallback_a_kernel_runs_whenever_it_can_at_all(why, no_fallback):
    made = plan(call(**FALLBACKS[why]), explicit("triton"))
    if why in ("few queries", "eight queries", "few keys", "decoding over few keys"):
        assert made.forward == "triton"
    else:
        assert made.error is not None and made.forward == "none"


def test_without_fallback_the_small_head_dim_switch_is_off(no_fallback):
    with settings.override(triton_allow_small_d=False):
        assert plan(call(head_dim=64), explicit("triton")).forward == "triton"


def test_without_fallback_auto_has_no_sdpa(no_fallback):
    assert plan(call(head_dim=64)).forward in NAMES
    assert plan(call(dtype=torch.float32)).error is not None
    with settings.override(default_backend="sdpa"):
        assert plan(call(head_dim=64)).forward in NAMES


def test_without_fallback_sdpa_itself_can_still_be_asked_for(no_fallback):
    assert plan(call(), explicit("sdpa")).forward == "sdpa"


# --- a backend that is off --------------------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    monkeypatch.setitem(dispatch._MODULES, "triton", (None, "OSError: no such library"))


def test_a_broken_backend_is_left_out_and_explained(broken):
    made = plan(call(capability=(8, 0)))
    assert made.forward == "cute"
    assert "OSError: no such library" in str(made)
    refused = plan(call(), explicit("triton"))
    assert type(refused.error) is RuntimeError and "OSError: no such library" in str(refused.error)


def test_a_backend_that_is_not_built_says_so(monkeypatch):
    def supports(call, config=None, *, backward=False):
        return refuse("not built", "unqualified", NotImplementedError, "the CUDA backend is not built yet")

    monkeypatch.setitem(dispatch._MODULES, "cuda", (types.SimpleNamespace(supports=supports), None))
    made = plan(call(), explicit("cuda"))
    assert type(made.error) is NotImplementedError and "not built yet" in str(made.error)
    assert plan(call(q_len=16), explicit("cuda")).forward == "sdpa"


# --- the plan in words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [None, explicit("triton"), explicit("sdpa"), Route("cute"), explicit("cuda-fp8")])
@pytest.mark.parametrize("changes", [{}, {"head_dim": 40}, {"dtype": torch.float32}, {"needs_grad": True}])
def test_a_plan_names_every_backend_with_a_reason(route, changes):
    made = plan(call(**changes), route)
    text = str(made)
    assert sorted(candidate.backend for candidate in made.candidates) == ["cuda", "cute", "sdpa", "triton"]
    for candidate in made.candidates:
        assert candidate.reason and candidate.reason in text and candidate.backend in text
    if made.error is not None:
        assert type(made.error).__name__ in text and str(made.error) in text
    else:
        assert f"forward   {made.forward}: {made.reason}" in text and made.backward_reason


# --- names and configs ------------------------------------------------------------------------------------------------

CONFIGS = [
    SDPABackend(),
    TritonBackend(),
    TritonBackend(autotune=True, autotune_mode="max", workspace_mb=7),
    CUDABackend(),
    CUDABackend(family="native", acc="f16"),
    CUDABackend(enable_fp8=True, qk="int8", hybrid=False, smooth_k=False, smooth_v=True),
    CUDABackend(enable_fp4=True),
    CuTeDSLBackend(target="sm_90a", workspace_mb=3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_configs_survive_copies_and_are_equal_by_value(config):
    for other in (copy.deepcopy(config), copy.copy(config), pickle.loads(pickle.dumps(config))):
        assert other == config and hash(other) == hash(config)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_configs_are_frozen(config):
    for field in (*(field.name for field in dataclasses.fields(config)), "name"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field, 1)


def test_config_fields_are_the_documented_ones():
    fields = {kind.__name__: {f.name: f.default for f in dataclasses.fields(kind)} for kind in
              (SDPABackend, TritonBackend, CUDABackend, CuTeDSLBackend)}  # fmt: skip
    assert fields == {
        "SDPABackend": {},
        "TritonBackend": {"autotune": False, "autotune_mode": "fast", "workspace_mb": 1024},
        "CUDABackend": {
            "family": "auto", "acc": "f32", "enable_fp8": False, "enable_fp4": False, "smooth_k": True,
            "smooth_v": False, "fast_accum": False, "qk": "fp8", "hybrid": None,
        },
        "CuTeDSLBackend": {"target": "auto", "workspace_mb": 1024},
    }  # fmt: skip


@pytest.mark.parametrize(
    "name, config",
    [
        ("sdpa", SDPABackend()), ("cuda", CUDABackend()), ("cuda-fp8", CUDABackend(enable_fp8=True)),
        ("cuda-fp4", CUDABackend(enable_fp4=True)), ("triton", TritonBackend()), ("cute", CuTeDSLBackend()),
        ("cutedsl", CuTeDSLBackend()), ("auto", None), (None, None), (TritonBackend(workspace_mb=5),) * 2,
    ],
)  # fmt: skip
def test_names_stand_for_configs(name, config):
    assert resolve_backend(name) == config


@pytest.mark.parametrize("argument", ["backend", "forward_backend", "backward_backend"])
def test_an_unknown_name_raises_naming_the_argument_and_the_choices(argument):
    query = torch.randn(1, 1, 4, 64)
    with pytest.raises(ValueError, match=f"{argument}='tritton' .*'triton'.*'cute'"):
        ffpa_attn_func(query, query, query, **{argument: "tritton"})
    with pytest.raises(TypeError, match=f"{argument} must be None, a backend name or a backend config, not int"):
        ffpa_attn_func(query, query, query, **{argument: 3})


@pytest.mark.parametrize(
    "make",
    [
        lambda: TritonBackend(autotune_mode="slow"),
        lambda: TritonBackend(workspace_mb=0),
        lambda: TritonBackend(workspace_mb=1.5),
        lambda: TritonBackend(autotune="no"),
        lambda: CUDABackend(enable_fp8="no"),
        lambda: CUDABackend(smooth_k=None),
        lambda: CUDABackend(hybrid="no"),
        lambda: CUDABackend(family="wmma"),
        lambda: CUDABackend(acc="bf16"),
        lambda: CUDABackend(qk="int4"),
        lambda: CUDABackend(enable_fp8=True, enable_fp4=True),
        lambda: CuTeDSLBackend(target="sm_70"),
        lambda: CuTeDSLBackend(workspace_mb=-1),
    ],
)
def test_a_config_of_nonsense_raises_where_it_is_made(make):
    with pytest.raises(ValueError, match="Backend: "):
        make()


@pytest.mark.parametrize("strict", ["no", 1, None])
def test_strict_is_a_switch_wherever_it_is_given(strict):
    with pytest.raises(TypeError, match="strict must be True or False, not "):
        ffpa_hf.FFPAAttnProcessor(strict=strict)
    with pytest.raises(TypeError, match="strict must be True or False, not "):
        ffpa_hf.enable(torch.nn.Identity(), strict=strict)


# --- real calls -------------------------------------------------------------------------------------------------------


@pytest.fixture
def real(monkeypatch, built):
    """The backends as they are."""
    monkeypatch.undo()
    forget_plans()
    with settings.override(triton_interpret=False):
        yield


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


def test_a_fallback_warns_once_per_backend_and_reason(real):
    long, short = half(1, 1, 520, 64), half(1, 1, 520, 64)
    with pytest.warns(FallbackWarning, match="tensors on cpu.*SDPA runs instead of triton") as caught:
        ffpa_attn_func(long, long, long, backend="triton")
        ffpa_attn_func(short, short, short, backend="triton")
        ffpa_attn_func(long, long, long, None, backend=TritonBackend(workspace_mb=3))
    assert len(caught) == 1
    assert caught[0].filename == __file__  # points at the user's line
    with pytest.warns(FallbackWarning, match="instead of cute"):
        ffpa_attn_func(long, long, long, backend="cute")
    assert issubclass(FallbackWarning, UserWarning) and ffpa_hf.FallbackWarning is FallbackWarning


def test_another_reason_warns_again():
    query = torch.randn(1, 1, 16, 64, dtype=torch.float16)
    seen = []
    for tensors in ((query,) * 3, (query[..., :40],) * 3):
        made = plan(dataclasses.replace(explain(*tensors).call, device_type="cuda"), explicit("triton"))
        seen.append(made.fallback[1])
    assert len(set(seen)) == 2


@pytest.mark.parametrize("level, expected", [("error", 0), ("warning", 1), ("debug", 1)])
def test_the_log_level_silences_fallback_warnings(real, level, expected):
    query = half(1, 1, 4, 64)
    with settings.override(log=level), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ffpa_attn_func(query, query, query, backend="triton")
    assert len(caught) == expected


def test_the_debug_level_prints_every_plan(real, capsys):
    query = half(1, 1, 4, 64)
    ffpa_attn_func(query, query, query)
    assert capsys.readouterr().err == ""
    with settings.override(log="debug"):
        ffpa_attn_func(query, query, query)
    assert "forward   sdpa" in capsys.readouterr().err


def test_auto_never_warns(real, recwarn):
    for width in (40, 64, 320):
        query = half(1, 1, 16, width)
        ffpa_attn_func(query, query, query)
        ffpa_attn_func(query, query, query, backend="auto")
    assert not recwarn.list


def test_explicit_fp32_raises_even_on_a_cpu(real):
    query = torch.randn(1, 1, 4, 64)
    for backend in NAMES:
        with pytest.raises(TypeError, match=f"query dtype float32: the {backend} backend.*backend='sdpa'"):
            ffpa_attn_func(query, query, query, backend=backend)


@pytest.mark.parametrize("backend", ["cuda", "cute"])
def test_what_is_not_built_never_runs_by_name(real, backend):
    query = torch.randn(1, 1, 4, 64, dtype=torch.float16)
    with pytest.warns(FallbackWarning):
        assert torch.equal(ffpa_attn_func(query, query, query, backend=backend), ffpa_attn_func(query, query, query))


@pytest.mark.parametrize("backend", ["sdpa", "cuda", "cuda-fp8", "cuda-fp4", "triton", "cute", "auto"])
@pytest.mark.parametrize("kind", ["bool", "additive", "intervals", "causal"])
def test_no_backend_ever_drops_a_mask(backend, kind):
    # Every name either honours the mask or says that it cannot.
    query, key, value = (torch.randn(1, 2, 8, 64, dtype=torch.float16) for _ in range(3))
    keep = torch.ones(8, 8, dtype=torch.bool).tril()
    masks = {
        "bool": {"attn_mask": keep},
        "additive": {"attn_mask": torch.zeros(8, 8, dtype=torch.float16).masked_fill(~keep, -torch.inf)},
        "intervals": {"attn_mask": RowIntervals.causal(8, 8)},
        "causal": {"is_causal": True},
    }
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=True)
    with settings.override(triton_interpret=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        try:
            out = ffpa_attn_func(query, key, value, **masks[kind], backend=backend)
        except NotImplementedError as refused:
            assert "attn_mask" in str(refused) and backend.split("-")[0] in str(refused)
            return
    assert torch.allclose(out.double(), expected, atol=3e-3)


@pytest.mark.skipif(HAS_GPU, reason="the interpreter is for machines without a GPU")
def test_with_the_interpreter_triton_takes_cpu_tensors(real):
    assert KERNELS, "no kernel backend is built"
    query = torch.randn(1, 2, 512, 64, dtype=torch.float16)
    with settings.override(triton_interpret=True):
        assert explain(query, query, query, backend="triton").forward == "triton"
        assert explain(query[:, :, :100], query, query, backend="triton").forward == "sdpa"  # short all the same
        with settings.override(force_no_sdpa_fallback=True):
            assert explain(query[:, :, :100], query, query, backend="triton").forward == "triton"
        with pytest.raises(TypeError, match="bfloat16.*interpreter"):
            ffpa_attn_func(*(query.bfloat16(),) * 3, backend="triton")
    assert explain(query, query, query, backend="triton").forward == "sdpa"


def test_autotuning_is_no_reason_to_refuse_a_call():
    made = plan(call(), Route(TritonBackend(autotune=True), strict=True))
    assert made.error is None and made.forward_config == TritonBackend(autotune=True)


def test_options_of_the_cuda_backend_are_checked_whatever_the_size():
    for config, changes, word in (
        (CUDABackend(enable_fp8=True), {"dropout_p": 0.1, "q_len": 64, "kv_len": 64}, "dropout"),
        (CUDABackend(acc="f16"), {"dtype": torch.bfloat16}, "acc='f16'"),
    ):
        answer = importlib.import_module("ffpa_hf.kernels.cuda").supports(call(**changes), config)
        assert answer.kind == "error" and word in answer.reason


# --- calls like earlier ones ------------------------------------------------------------------------------------------


@pytest.fixture
def looked_at(monkeypatch):
    """How often arguments were checked and planned; calls on fresh tensors of one shape."""
    counted = []
    prepare = functional._prepare
    monkeypatch.setattr(functional, "_prepare", lambda *given: (counted.append(given), prepare(*given))[1])
    forget_plans()
    return counted


def qkv(kv_heads=2, dtype=torch.float32):
    return [torch.randn(1, heads, 6, 64, dtype=dtype, device=DEVICE) for heads in (2, kv_heads, kv_heads)]


def test_a_call_like_an_earlier_one_is_not_looked_at_again_and_is_right(looked_at):
    for _ in range(3):
        tensors = qkv()
        torch.testing.assert_close(
            ffpa_attn_func(*tensors, scale=0.3), F.scaled_dot_product_attention(*tensors, scale=0.3)
        )
    assert len(looked_at) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"is_causal": True}, {"scale": 0.3}, {"softcap": 2.0}, {"return_lse": True}, {"backend": "sdpa"},
        {"dropout_p": 0.5}, {"attn_mask": torch.ones(6, 6, dtype=torch.bool, device=DEVICE)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_another_argument_makes_another_call(looked_at, change):
    ffpa_attn_func(*qkv())
    ffpa_attn_func(*qkv(), **change)
    assert len(looked_at) == 2


def test_gradients_settings_verdicts_and_autocast_make_another_call(looked_at):
    def calls(**given):
        before = len(looked_at)
        ffpa_attn_func(*(tensor.requires_grad_(bool(given)) for tensor in qkv()))
        return len(looked_at) - before

    assert [calls(), calls()] == [1, 0]
    assert [calls(grad=True), calls(grad=True)] == [1, 0]
    with settings.override(log="error"):
        assert [calls(), calls()] == [1, 0]
    forget_plans()
    assert [calls(), calls()] == [1, 0]
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert [calls(), calls()] == [1, 1]
        assert ffpa_attn_func(*qkv()).dtype == torch.bfloat16
    assert ffpa_attn_func(*qkv()).dtype == torch.float32


def test_a_wrong_call_stays_wrong_after_a_right_one(looked_at):
    query, key, value = qkv()
    ffpa_attn_func(query, key, value)
    for wrong, error in (
        ((query, key[..., :32], value), ValueError), ((query, key, value.double()), TypeError),
        ((query, key.numpy(force=True), value), TypeError), ((query, *qkv(kv_heads=1)[1:]), None),
        ((query, key.to_sparse(), value), TypeError),
    ):  # fmt: skip
        with pytest.raises(error) if error else contextlib.nullcontext():
            ffpa_attn_func(*wrong)
    with pytest.raises(ValueError, match="dropout_p"):
        ffpa_attn_func(query, key, value, dropout_p=1.5)


def test_broadcast_heads_are_made_again_for_every_call(looked_at):
    for _ in range(2):
        query, key, value = qkv()
        expected = F.scaled_dot_product_attention(query, key, value[:, :1].expand_as(value))
        torch.testing.assert_close(ffpa_attn_func(query, key, value[:, :1]), expected)
    assert len(looked_at) == 2


def test_a_repeated_call_is_counted(looked_at):
    before = sum(row.calls for row in ffpa_hf.report())
    for _ in range(4):
        ffpa_attn_func(*qkv())
    assert sum(row.calls for row in ffpa_hf.report()) == before + 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", 1), ("is_causal", None), ("is_causal", "no"), ("enable_gqa", "x"), ("return_lse", 0),
        ("dropout_p", "0.1"), ("dropout_p", None), ("scale", torch.tensor(0.3)), ("scale", "x"), ("softcap", True),
        ("softcap", torch.tensor(5.0)),
    ],
)  # fmt: skip
def test_options_of_wrong_types_are_refused_by_name_every_time(looked_at, name, value):
    ffpa_attn_func(*qkv(), is_causal=True)
    for _ in range(2):
        with pytest.raises(TypeError, match=f"^{name} must be"):
            ffpa_attn_func(*qkv(), **{name: value})


def test_a_plan_made_before_a_change_is_not_remembered_as_one_made_after_it():
    forget_plans()
    state = dispatch.plan_state()
    made = explain(*qkv())
    dispatch.tables_changed()
    dispatch.remember(("name",), made, state)
    assert dispatch.recall(("name",)) is None
    dispatch.remember(("name",), made, dispatch.plan_state())
    assert dispatch.recall(("name",)) is made


def test_a_verdict_that_changes_counts_at_once():
    before = dispatch.plan_state()
    qualification.forget()
    assert dispatch.plan_state() != before
