"""What a call costs the host: how it is measured, and that it stays small, counted in calls rather than in time."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
import torch
from oracle import DEVICE

from ffpa_hf import ffpa_attn_func, settings
from ffpa_hf.bench import overhead, runner
from ffpa_hf.bench.cases import Case
from ffpa_hf.bench.results import Results

pytest.importorskip("triton")

from ffpa_hf.kernels.triton import configs, launch  # noqa: E402

HOST = Case("host_small", 4, 1, 64, 64, kv_heads=2, host=True, dtype="float32")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(overhead, "_BATCH", 2)
    monkeypatch.setattr(overhead, "_BATCHES", (2, 2))


def test_a_host_case_gives_the_bare_launch_and_what_is_above_it():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = HOST if device.type == "cpu" else Case("host_small", 4, 1, 64, 64, kv_heads=2, host=True)
    results = Results("here", "2026-01-01", "none", {})
    assert runner.run([case], None, [], results, device, seconds=0.1) == []
    rows = {row.provider: row for row in results.rows}
    assert list(rows) == ["sdpa", overhead.BARE, "ffpa_hf/triton", "ffpa_hf/triton, recording"]
    assert all(row.ms > 0 and row.case == "host_small" for row in rows.values())
    assert "launch" in rows[overhead.BARE].note and "us above" in rows["ffpa_hf/triton"].note


class Stub:
    """In a kernel's place: takes a launch and does nothing."""

    launches = 0

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **keywords):
        Stub.launches += 1


@contextmanager
def stubs(monkeypatch):
    """CPU tensors go the whole way to launches that do nothing, as to a GPU with descriptors."""
    with monkeypatch.context() as patch:
        for module, name in overhead.kernels():
            patch.setattr(module, name, Stub())
        target = configs.target_for((9, 0))
        patch.setattr(launch, "_target", lambda where: target)
        with settings.override(triton_interpret=True, force_no_sdpa_fallback=True):
            yield


def test_recording_leaves_every_kernel_in_its_place_and_repeats_the_launches(monkeypatch):
    query, key = (torch.randn(*size, device=DEVICE).half() for size in ((1, 4, 1, 64), (1, 2, 70, 64)))
    with stubs(monkeypatch):
        before = {(module.__name__, name): getattr(module, name) for module, name in overhead.kernels()}
    places = overhead.kernels()
    assert {"attention_forward", "backward_scores"} <= {name for _, name in places} and not before
    with settings.override(triton_interpret=True, force_no_sdpa_fallback=True), torch.no_grad():
        launches = overhead.recorded(lambda: ffpa_attn_func(query, key, key, enable_gqa=True, backend="triton"))
        assert launches and [getattr(module, name) for module, name in places] == [
            getattr(module, name) for module, name in overhead.kernels()
        ]
        for again in launches:
            again()


def calls_made(function) -> int:
    """Python and C functions entered while `function` runs: the same on every machine, unlike time."""
    count = 0

    def watch(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors go to kernels in the interpreter only")
@pytest.mark.parametrize("recording, most", [(False, 170), (True, 230)], ids=["no gradient", "recording"])
def test_a_call_like_an_earlier_one_does_little(monkeypatch, recording, most):
    query = torch.randn(1, 4, 1, 128, dtype=torch.float16, requires_grad=recording)
    key = torch.randn(1, 2, 1024, 128, dtype=torch.float16)

    def call():
        ffpa_attn_func(query, key, key, enable_gqa=True, backend="triton")

    with stubs(monkeypatch):
        first = calls_made(call)
        again = calls_made(call)
        launches, Stub.launches = Stub.launches, 0
        assert launches and calls_made(call) == again < first
    assert again <= most, f"{again} calls"
