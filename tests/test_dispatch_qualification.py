"""The planner reads verdicts and measured tables, eagerly and while torch.compile traces; no GPU is needed."""

from __future__ import annotations

import json

import pytest
import torch

from ffpa_hf import dispatch, settings
from ffpa_hf.backends import TritonBackend
from ffpa_hf.call import AttentionCall
from ffpa_hf.dispatch import Route, plan
from ffpa_hf.kernels import qualification
from ffpa_hf.kernels.tuning import preferences

SHIPPED = {
    "triton": {
        "source_hash": "0",
        "ran": {"sm_90": {"device": "NVIDIA H200", "torch": "2.11", "compiler": "triton 3.6", "date": "2026-11-30"}},
        "kin": ["sm_80"],
        "unrun": ["rocm"],
    }
}


@pytest.fixture
def verdicts(tmp_path, monkeypatch):
    path = tmp_path / "shipped.json"
    path.write_text(json.dumps(SHIPPED))
    monkeypatch.setattr(qualification, "_SHIPPED", path)
    qualification.forget()
    dispatch.forget_plans()
    with settings.override(cache_dir=str(tmp_path / "kept"), allow_unqualified=False):
        yield
    qualification.forget()
    dispatch.forget_plans()


def call(length=4096, capability=(9, 0), is_rocm=False, name="some GPU", **more):
    sizes = {"batch": 1, "q_heads": 16, "kv_heads": 16, "q_len": length, "kv_len": length}
    sizes |= {"head_dim": 512, "value_dim": 512, "dtype": torch.bfloat16}
    return AttentionCall(**sizes, capability=capability, is_rocm=is_rocm, device_name=name, **more)


def test_auto_takes_kernels_that_ran_and_their_kin(verdicts):
    for capability in ((9, 0), (8, 0)):
        assert plan(call(capability=capability)).forward == "triton"


def test_auto_leaves_unrun_kernels_out(verdicts):
    made = plan(call(capability=(9, 4), is_rocm=True))
    assert made.error is None and made.forward == "sdpa"
    assert any(c.backend == "triton" and not c.accepted and "rocm" in c.reason for c in made.candidates)


def test_an_unrun_kernel_asked_for_raises_and_names_the_self_test(verdicts):
    made = plan(call(capability=(9, 4), is_rocm=True), Route(TritonBackend(), strict=True))
    assert isinstance(made.error, RuntimeError) and "ffpa-hf selftest" in str(made.error)


def test_argument_errors_and_fallbacks_come_before_qualification(verdicts):
    wrong = call(capability=(9, 4), is_rocm=True)
    fp64 = AttentionCall(**{**wrong.__dict__, "dtype": torch.float64})
    assert isinstance(plan(fp64, Route("triton", strict=True)).error, TypeError)
    short = AttentionCall(**{**wrong.__dict__, "q_len": 64, "kv_len": 64})
    assert plan(short, Route("triton", strict=True)).forward == "sdpa"


def test_a_passed_self_test_or_the_switch_lets_it_run(verdicts):
    other = call(capability=(9, 4), is_rocm=True)
    with settings.override(allow_unqualified=True):
        assert plan(other, Route("triton", strict=True)).forward == "triton"
    qualification.keep("triton", (9, 4), True, "some GPU", cases=1, failed=0, date="2026-12-01")
    dispatch.forget_plans()
    assert plan(other, Route("triton", strict=True)).forward == "triton"


def test_the_planner_is_traced_whole_and_gives_the_eager_answer(verdicts, tmp_path, monkeypatch):
    one = call(length=2048)
    rows = [{"mask": "none", "grouped": False, "head_dim": one.head_dim, "lanes": one.batch * one.q_heads, "q_len": n,
             "kv_len": n, "speedups": {"triton": [s, s]}} for n, s in ((128, 0.5), (2048, 2.0))]  # fmt: skip
    (tmp_path / "some-gpu.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(preferences, "_TABLES", tmp_path)
    preferences.forget()

    def function(x):
        forward = plan(call(length=x.shape[0])).forward
        return x + 1 if forward == "triton" else x - 1

    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in (4096, 5000, 9000):
        assert compiled(torch.zeros(length))[0].item() == function(torch.zeros(length))[0].item() == 1
    assert counter.frame_count <= 2
    assert compiled(torch.zeros(600))[0].item() == function(torch.zeros(600))[0].item() == -1
    preferences.forget()
