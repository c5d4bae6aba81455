"""QK-norm, rotary embedding and placement: definition against a written-out loop, kernel against definition."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ffpa_hf import joint, ops, settings
from ffpa_hf.joint import Stream, join
from ffpa_hf.kernels import qualification, selftest_qkv
from ffpa_hf.kernels.reference import join_streams

pytest.importorskip("triton")

from ffpa_hf.kernels.triton import launch, qkv_kernels  # noqa: E402


@pytest.fixture
def kernel(monkeypatch):
    """Every call without a gradient takes the kernel, as on a GPU where it is qualified; counts them."""
    calls = []
    original = qkv_kernels.join_streams
    monkeypatch.setattr(qkv_kernels, "join_streams", lambda *values: calls.append(values) or original(*values))
    with settings.override(triton_interpret=True, force_no_sdpa_fallback=True, allow_unqualified=True):
        yield calls


def tables(length, head_dim, device="cpu", dtype=torch.float32):
    """(cos, sin) of random factors, all four of a pair different."""
    return tuple(torch.randn(1, length, head_dim // 2, 2, device=device, dtype=dtype) for _ in range(2))


# --- the definition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("across_heads", [False, True])
def test_definition_is_what_its_text_says(across_heads, interleaved):
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64)
    weight = torch.randn(12 if across_heads else 6, dtype=torch.float64)
    cos, sin = tables(3, 6, dtype=torch.float64)
    result = join_streams([x], [weight], [1e-3], [cos], [sin], across_heads, interleaved)
    for b in range(2):
        for n in range(3):
            for h in range(2):
                row = x[b, n].flatten() if across_heads else x[b, n, h]
                normed = row / (row.square().mean() + 1e-3).sqrt() * weight
                normed = normed.view(2, 6)[h] if across_heads else normed
                for p in range(3):
                    first, second = (2 * p, 2 * p + 1) if interleaved else (p, p + 3)
                    a, c = normed[first], normed[second]
                    want_first = a * cos[0, n, p, 0] - c * sin[0, n, p, 0]
                    want_second = c * cos[0, n, p, 1] + a * sin[0, n, p, 1]
                    assert abs(result[b, n, h, first] - want_first) < 1e-12
                    assert abs(result[b, n, h, second] - want_second) < 1e-12


def test_definition_is_differentiable_in_everything():
    x, weight = torch.randn(1, 2, 2, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    cos, sin = tables(2, 4, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, weight, cos, sin)]

    def function(x, weight, cos, sin):
        return join_streams([x, x * 2], [weight, None], [1e-3, -1.0], [cos, None], [sin, None])

    assert torch.autograd.gradcheck(function, leaves)


# --- the kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", selftest_qkv.grid(interpreted=True), ids=str)
def test_kernel_is_one_rounding_from_the_definition(check, device):
    outcome = selftest_qkv.run_check(check, device)
    assert outcome.passed, (outcome.worst, outcome.note)


def _edited(edit):
    def join_streams(streams, weights, eps, cos, sin, across_heads, interleaved):
        changed = edit(SimpleNamespace(streams=streams, weights=weights, eps=eps, cos=cos, sin=sin))
        return torch.ops.ffpa.join_streams(
            changed.streams, changed.weights, changed.eps, changed.cos, changed.sin, across_heads, interleaved
        )

    return join_streams


def _set(**fields):
    return lambda call: SimpleNamespace(**{**vars(call), **{name: make(call) for name, make in fields.items()}})


@pytest.mark.parametrize(
    "edit",
    [
        _set(eps=lambda c: [e + 0.01 for e in c.eps]),
        _set(weights=lambda c: [None for _ in c.weights]),
        _set(cos=lambda c: c.sin),
        _set(sin=lambda c: [None if s is None else -s for s in c.sin]),
        _set(streams=lambda c: [s.flip(1) for s in c.streams]),
        _set(streams=lambda c: [s.flip(2) for s in c.streams]),
    ],
)
def test_the_self_test_catches_a_wrong_kernel(edit, monkeypatch, device):
    check = selftest_qkv.grid(interpreted=True)[0]
    right, wrong = qkv_kernels.join_streams, _edited(edit)
    monkeypatch.setattr(ops, "_kernel", lambda name: SimpleNamespace(join_streams=right))
    monkeypatch.setattr(qkv_kernels, "join_streams", wrong)
    outcome = selftest_qkv.run_check(check, device)
    assert not outcome.passed and outcome.errors, outcome.note


def test_the_self_test_catches_an_unwritten_row(monkeypatch, device):
    original = qkv_kernels.join_streams

    def lazy(*values):
        out = original(*values)
        return torch.cat([out[:, :-1], out.new_empty(out[:, -1:].shape)], 1)

    monkeypatch.setattr(qkv_kernels, "join_streams", lazy)
    outcome = selftest_qkv.run_check(selftest_qkv.grid(interpreted=True)[0], device)
    assert not outcome.passed and outcome.errors


def test_wide_addresses_change_no_bit(kernel, device, monkeypatch):
    x, (cos, sin) = torch.randn(2, 3, 3, 16, device=device), tables(3, 16, device)
    arguments = ([x], [None], [1e-6], [cos], [sin], False, True)
    narrow = qkv_kernels.join_streams(*arguments)
    monkeypatch.setattr(launch, "FORCE_WIDE", True)
    assert torch.equal(qkv_kernels.join_streams(*arguments), narrow)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 12, 24, 30, 38, 40, 48, 64])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 128, 256])
def test_tiles_hold_a_token_within_limits(heads, head_dim):
    block, pairs, warps = qkv_kernels._tile(heads, head_dim, False)
    assert block & (block - 1) == 0 and 2 * pairs >= head_dim and block * 2 * pairs <= 4096
    assert -(-heads // block) * block < 2 * heads or block == 1, "more than half of the work is for nobody"
    assert 1 <= warps <= 16 and warps & (warps - 1) == 0
    whole, pairs, _ = qkv_kernels._tile(heads, head_dim, True)
    assert whole >= heads, "a norm over all heads needs them all"


# --- the door ---------------------------------------------------------------------------------------------------------


def test_without_a_gpu_plain_torch_runs(monkeypatch):
    monkeypatch.setattr(ops, "join_streams", None)
    x = torch.randn(1, 3, 2, 16)
    assert torch.equal(join([Stream(x, 1e-6)]), join_streams([x], [None], [1e-6], [None], [None]))


def test_the_kernel_serves_what_it_can(kernel, device):
    x, weight = torch.randn(2, 3, 2, 16, device=device), torch.randn(16, device=device)
    result = join([Stream(x, 1e-6, weight, tables(3, 16, device)), Stream(x[:, :1])])
    assert len(kernel) == 1 and result.shape == (2, 4, 2, 16) and result.is_contiguous()


@pytest.mark.parametrize(
    "stream",
    [
        Stream(torch.randn(1, 3, 2, 12), 1e-6),
        Stream(torch.randn(1, 3, 2, 264), 1e-6),
        Stream(torch.randn(1, 3, 2, 16, dtype=torch.float64), 1e-6),
        Stream(torch.randn(1, 3, 2, 16), 1e-6, torch.randn(16, dtype=torch.float64)),
        Stream(torch.randn(1, 3, 2, 16, requires_grad=True), 1e-6),
        Stream(torch.randn(1, 3, 2, 16), 1e-6, torch.randn(16, requires_grad=True)),
    ],
)
def test_what_the_kernel_cannot_do_torch_does(stream, kernel):
    result = join([stream])
    assert not kernel and result.shape == stream.heads.shape and result.dtype == stream.heads.dtype
    assert result.requires_grad == any(t is not None and t.requires_grad for t in stream[:3:2])


def test_a_token_too_wide_for_one_program_is_torchs(kernel):
    join([Stream(torch.randn(1, 1, 65, 256), 1e-6)], across_heads=True)
    assert not kernel


def test_streams_of_two_dtypes_are_promoted_as_torch_does(kernel):
    assert join([Stream(torch.randn(1, 2, 1, 16)), Stream(torch.randn(1, 2, 1, 16).half())]).dtype == torch.float32
    assert not kernel


def test_without_grad_mode_parameters_take_the_kernel(kernel, device):
    weight = torch.nn.Parameter(torch.randn(16, device=device))
    with torch.no_grad():
        join([Stream(torch.randn(1, 3, 2, 16, device=device), 1e-6, weight)])
    assert len(kernel) == 1


@pytest.mark.parametrize("qualified", [True, False])
def test_the_verdict_decides_on_a_gpu(qualified, monkeypatch):
    level = "run" if qualified else "unrun"
    monkeypatch.setattr(joint, "device_facts", lambda device: ((9, 0), False, "some GPU"))
    monkeypatch.setattr(qualification, "verdict", lambda *facts: qualification.Verdict(level, ""))
    assert joint._qualified(torch.device("cuda"), False) is qualified
    assert joint._qualified(torch.device("cuda"), True) is True


def test_a_table_of_another_length_is_refused():
    for length, width in ((4, 16), (3, 8), (1, 16)):
        with pytest.raises(ValueError, match="rotary"):
            join([Stream(torch.randn(1, 3, 2, 16), rotary=tables(length, width))])


def test_a_weight_or_a_stream_that_does_not_fit_is_refused():
    x = torch.randn(1, 3, 2, 16)
    with pytest.raises(ValueError, match="weight"):
        join([Stream(x, 1e-6, torch.randn(32))])
    with pytest.raises(ValueError, match="weight"):
        join([Stream(x, 1e-6, torch.randn(16))], across_heads=True)
    with pytest.raises(ValueError, match="heads"):
        join([Stream(x), Stream(torch.randn(1, 3, 3, 16))])


def test_compiled_whole_with_the_true_strides(kernel, device):
    x = torch.randn(2, 6, 3, 2, 16, device=device)[:, :, 1]
    cos, sin = tables(6, 16, device)

    def function(x, cos, sin):
        return join([Stream(x, 1e-6, None, (cos, sin)), Stream(x)])

    with torch.no_grad():
        expected = function(x, cos, sin)
        kernel.clear()
        result = torch.compile(function, fullgraph=True, backend="aot_eager")(x, cos, sin)
    assert len(kernel) == 1 and torch.equal(result, expected) and result.stride() == expected.stride()


def test_operator_passes_torchs_own_check(kernel, device):
    x, (cos, sin) = torch.randn(1, 3, 2, 16, device=device), tables(3, 16, device)
    torch.library.opcheck(
        torch.ops.ffpa.join_streams.default,
        ([x, x[:, :1]], [None, torch.randn(16, device=device)], [1e-6, 1e-5], [cos, None], [sin, None], False, True),
        test_utils=("test_schema", "test_faketensor"),
    )
