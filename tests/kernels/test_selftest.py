"""The self-test passes right kernels and catches wrong ones, one sabotage at a time."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ffpa_hf.kernels import selftest
from ffpa_hf.kernels.philox import philox_keep_mask
from ffpa_hf.kernels.reference import attention
from ffpa_hf.kernels.selftest import Check, run_check

CPU = torch.device("cpu")
LEAVES = ("query", "key", "value", "bias", "sinks")


def _attend(inputs):
    def wide(tensor):
        return None if tensor is None else tensor.float()

    keep = None
    if inputs.rng_state is not None:
        shape = (*inputs.query.shape[:3], inputs.key.shape[2])
        keep = philox_keep_mask(inputs.rng_state, *shape, inputs.dropout_p)
    return attention(
        wide(inputs.query), wide(inputs.key), wide(inputs.value), scale=inputs.scale, is_causal=inputs.is_causal,
        mask=inputs.mask, bias=wide(inputs.bias), row_start=inputs.row_start, row_end=inputs.row_end,
        key_mask=inputs.key_mask, sinks=wide(inputs.sinks), softcap=inputs.softcap, keep=keep,
        dropout_p=inputs.dropout_p,
    )  # fmt: skip


class Model:
    """A kernel family in plain torch: float32 inside, results in the input dtype."""

    def forward(self, inputs, config):
        out, lse = _attend(inputs)
        return out.to(inputs.query.dtype), lse.float(), torch.empty(0)

    def backward(self, inputs, out, lse, row_stats, grad_out, grad_lse, needs, config):
        leaves = {
            name: getattr(inputs, name).detach().requires_grad_() for name, n in zip(LEAVES, needs, strict=True) if n
        }
        result, logs = _attend(replace(inputs, **leaves))
        outputs, grads = [result], [grad_out.float()]
        if grad_lse is not None:
            outputs.append(logs.masked_fill(logs == -torch.inf, 0.0))
            grads.append(grad_lse)
        found = dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), grads), strict=True))
        return tuple(found.get(name) for name in LEAVES)


@pytest.mark.parametrize("check", selftest.grid(interpreted=True), ids=str)
def test_right_kernels_pass_every_check(check):
    outcome = run_check(Model(), None, check, CPU)
    assert outcome.passed, (outcome.worst, outcome.note)


def test_bfloat16_and_the_gpu_grid_pass_too():
    for check in [c for c in selftest.grid() if c.head_dim == 128 and c.dtype == torch.float16][::3]:
        bf16 = replace(check, dtype=torch.bfloat16, head_dim=64)
        outcome = run_check(Model(), None, bf16, CPU)
        assert outcome.passed, (str(bf16), outcome.worst, outcome.note)


def _sabotaged(**methods):
    model = Model()
    return SimpleNamespace(**{"forward": model.forward, "backward": model.backward, **methods})


def _changed(change):
    """A forward whose inputs were tampered with."""
    model = Model()
    return _sabotaged(forward=lambda inputs, config: model.forward(replace(inputs, **change(inputs)), config))


def _backward_changed(change):
    model = Model()

    def backward(inputs, *rest):
        return model.backward(replace(inputs, **change(inputs)), *rest)

    return _sabotaged(backward=backward)


def _output(edit):
    model = Model()

    def forward(inputs, config):
        out, lse, stats = model.forward(inputs, config)
        edit(out, lse)
        return out, lse, stats

    return _sabotaged(forward=forward)


BASE = Check(torch.float16, 64, 40, 40)


@pytest.mark.parametrize(
    ("family", "check"),
    [
        (_output(lambda out, lse: out[0, 1, 7].zero_()), BASE),
        (_output(lambda out, lse: out[0, 0, 3, 5].add_(0.1)), BASE),
        (_output(lambda out, lse: out[0, 0, 39].fill_(torch.nan)), BASE),
        (_output(lambda out, lse: lse.add_(0.01)), BASE),
        (_output(lambda out, lse: lse.masked_fill_(lse == -torch.inf, 0.0)), replace(BASE, mask="bool")),
        (_changed(lambda i: {"scale": i.scale * 1.02}), BASE),
        (_changed(lambda i: {"is_causal": False}), replace(BASE, mask="causal")),
        (_changed(lambda i: {"mask": None}), replace(BASE, mask="bool keys")),
        (_changed(lambda i: {"key_mask": None}), replace(BASE, mask="holes", batch=2)),
        (_changed(lambda i: {"row_end": i.row_end.clamp(max=39)}), replace(BASE, mask="window")),
        (_changed(lambda i: {"bias": i.bias.clamp(min=-1e4)}), replace(BASE, mask="bias minima")),
        (_changed(lambda i: {"softcap": None}), replace(BASE, softcap=5.0)),
        (_changed(lambda i: {"sinks": None}), replace(BASE, sinks=True)),
        (_changed(lambda i: {"rng_state": i.rng_state + 1}), replace(BASE, dropout_p=0.2)),
        (_backward_changed(lambda i: {"rng_state": i.rng_state + 1}), replace(BASE, dropout_p=0.2)),
        (_backward_changed(lambda i: {"softcap": None}), replace(BASE, softcap=5.0)),
        (_sabotaged(backward=lambda *a: Model().backward(*a[:5], None, *a[6:])), replace(BASE, grad_lse=True)),
        (_sabotaged(backward=lambda *a: (*Model().backward(*a)[:3], None, None)), replace(BASE, mask="bias")),
    ],
    ids=[
        "a row lost", "one element off", "a row not written", "lse off",
        "dead rows' lse", "scale", "causal ignored", "mask ignored", "key mask ignored", "last key lost",
        "minima cut", "softcap ignored", "sinks ignored", "other dropout", "other dropout in backward",
        "softcap ignored in backward", "lse gradient ignored", "bias gradient missing",
    ],
)  # fmt: skip
def test_each_fault_is_caught(family, check):
    outcome = run_check(family, None, check, CPU)
    assert not outcome.passed, outcome.worst


def test_unwritten_memory_is_seen():
    def forward(inputs, config):
        out, lse, stats = Model().forward(inputs, config)
        fresh = torch.empty_like(out)
        fresh[:, :, :-1] = out[:, :, :-1]
        return fresh, lse, stats

    assert not run_check(_sabotaged(forward=forward), None, BASE, CPU).passed


def test_results_that_change_from_run_to_run_fail():
    runs = []

    def forward(inputs, config):
        out, lse, stats = Model().forward(inputs, config)
        runs.append(out)
        if len(runs) == 2:  # one unit in the last place: far inside the limits
            out[0, 0, 0, 0] = torch.nextafter(out[0, 0, 0, 0], torch.tensor(9.0, dtype=out.dtype))
        return out, lse, stats

    outcome = run_check(_sabotaged(forward=forward), None, BASE, CPU)
    assert len(runs) == 2
    assert not outcome.passed and outcome.note == "out differ when run again"


def test_a_kernel_that_raises_is_an_outcome():
    def forward(inputs, config):
        raise RuntimeError("out of shared memory\nand more")

    outcome = run_check(_sabotaged(forward=forward), None, BASE, CPU)
    assert not outcome.passed and outcome.note == "RuntimeError: out of shared memory"


def test_the_callers_determinism_settings_survive():
    before = torch.are_deterministic_algorithms_enabled()
    run_check(Model(), None, BASE, CPU)
    assert torch.are_deterministic_algorithms_enabled() == before


INTERPRETED = [
    Check(torch.float16, 64, 40, 72, heads=2, kv_heads=1),
    Check(torch.float32, 72, 40, 40, heads=1, kv_heads=1, mask="causal", grad_lse=True),
    Check(torch.float16, 64, 36, 40, heads=2, kv_heads=1, mask="holes", softcap=5.0, sinks=True, dropout_p=0.2),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU suite runs the whole grid on the GPU instead")
def test_triton_kernels_pass_in_the_interpreter():
    for outcome in selftest.run("triton", CPU, INTERPRETED):
        assert outcome.passed, (str(outcome.check), outcome.worst, outcome.note)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter")
def test_processes_share_the_checks_in_order():
    checks = [Check(torch.float16, 64, length, 16, heads=1, kv_heads=1) for length in (16, 8, 5)]
    checks.insert(1, Check(torch.float16, 64, 16, 16, heads=3, kv_heads=2))  # not a grouping: raises
    ended = []
    outcomes = selftest.run("triton", CPU, checks, ended.append, jobs=2)
    assert [outcome.check for outcome in outcomes] == checks and len(ended) == 4
    assert [outcome.passed for outcome in outcomes] == [True, False, True, True]


@pytest.mark.gpu
def test_triton_kernels_pass_on_this_gpu():
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    failed = [o for o in selftest.run("triton", torch.device("cuda"), jobs=jobs) if not o.passed]
    assert not failed, [(str(o.check), o.worst, o.note) for o in failed]


def test_grid_covers_the_promised_features():
    checks = selftest.grid()
    assert {c.head_dim for c in checks} >= {64, 72, 128, 256, 320, 512, 640, 1024}
    for dtype in (torch.float16, torch.bfloat16):
        mine = [c for c in checks if c.dtype == dtype]
        assert {c.mask for c in mine} == set(selftest.Mask.__args__)
        assert {c.layout for c in mine} == set(selftest.Layout.__args__)
        assert any(c.dropout_p for c in mine) and any(c.softcap for c in mine) and any(c.sinks for c in mine)
        assert any(c.grad_lse for c in mine) and any(c.broadcast_grad for c in mine)
        assert any(c.q_len < 8 for c in mine) and any(c.q_len > c.kv_len for c in mine)
        assert any(c.heads // c.kv_heads > 1 for c in mine) and any(c.batch > 1 for c in mine)


def test_block_ranges_are_those_of_the_masks():
    from ffpa_hf.masks import RowIntervals

    for mask in ("window", "lower right", "packed", "holes", "far apart"):
        inputs = selftest._build(Check(torch.float16, 64, 200, 260, mask=mask, batch=1), CPU).inputs
        start, end = RowIntervals(inputs.row_start, inputs.row_end).query_ranges(260)
        assert torch.equal(inputs.block_start.clamp(max=200), start), mask
        assert torch.equal(inputs.block_end, end), mask
