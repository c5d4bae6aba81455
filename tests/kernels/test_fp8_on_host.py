"""The FP8 kernels' own sources, launched by their own launchers, on a CPU model of Hopper: codes bit for bit, layouts
as the tensor core's descriptors read them, rings and turns that nobody waits for in vain.

The model is `hopper_on_host.h`; it needs a C++ compiler for this machine. What it cannot show, a GPU's self-test does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="pip install 'ffpa-hf[cuda]' brings NVRTC")

import hopper_on_host  # noqa: E402

from ffpa_hf.kernels import quantised_reference as quantised  # noqa: E402
from ffpa_hf.kernels import selftest_fp8  # noqa: E402
from ffpa_hf.kernels.common import AttentionInputs  # noqa: E402
from ffpa_hf.kernels.cuda import fp8_configs, fp8_launch  # noqa: E402
from ffpa_hf.kernels.selftest import Check  # noqa: E402

pytestmark = pytest.mark.skipif(hopper_on_host.COMPILER is None, reason="no C++ compiler on this machine")
CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16
SMALL = {"heads": 2, "kv_heads": 1}


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return hopper_on_host.Machine(tmp_path_factory.mktemp("host"))


def judge(machine, monkeypatch, check: Check, seed: int = 0) -> None:
    machine.seed = seed
    with hopper_on_host.running_on(machine, monkeypatch):
        outcome = selftest_fp8.run_check(check, CPU)
    assert outcome.passed, (outcome.note, [row for row in outcome.errors if not row[1] <= row[2]])


def test_the_self_test_passes_on_the_model(machine, monkeypatch):
    """64-byte tiles, three warpgroups in turns, a last tile of each kind that is not full."""
    for seed in range(3):
        judge(machine, monkeypatch, Check(FP16, 64, 200, 300, mask="causal", **SMALL), seed)
    assert set(machine.ran) == {"fp8_statistics", "fp8_finish", "fp8_codes", "fp8_forward"}


def test_promoted_sums_in_two_slices_behind_a_mask(machine, monkeypatch):
    judge(machine, monkeypatch, Check(BF16, 320, 100, 200, mask="bool", **SMALL))


def test_a_fault_in_the_ring_is_seen(machine, monkeypatch):
    """The model must be able to fail: with arrivals missing, somebody waits for ever."""
    text = hopper_on_host.source("fp8_forward")
    assert "K_EMPTY + 8 * i, 4 * GROUPS)" in text
    text = text.replace("K_EMPTY + 8 * i, 4 * GROUPS)", "K_EMPTY + 8 * i, 4 * GROUPS + 1)")
    monkeypatch.setattr(hopper_on_host, "source", lambda name: text)
    x = torch.zeros(1, 1, 8, 64, dtype=FP16)
    longer = torch.zeros(1, 1, 700, 64, dtype=FP16)
    config = fp8_configs.choose(64, False)
    operands = fp8_launch.Operands(
        torch.zeros(1 << 16, dtype=torch.uint8), torch.zeros(6 * 128 * 64, dtype=torch.uint8),
        torch.zeros(6 * 128 * 64, dtype=torch.uint8), *(torch.ones(1, 1, 700) for _ in range(6)),
    )  # fmt: skip
    fresh = hopper_on_host.Machine(machine.folder)
    with hopper_on_host.running_on(fresh, monkeypatch), pytest.raises(RuntimeError, match="deadlock"):
        inputs = AttentionInputs(x, longer, longer, scale=1.0)
        fp8_launch.attend(inputs, operands, config, x.clone(), torch.zeros(1, 1, 8), x.new_empty(0), 0, 0)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 65504.0])
def test_numbers_that_are_not_finite_get_the_codes_of_the_definition(machine, monkeypatch, number):
    """And what the kernel makes of them is what the definition makes of them, within the range of float16."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 150, 64, generator=generator).half() for _ in range(3))
    for tensor in (query, key, value):
        tensor[0, 0, 7, 5] = number
    inputs = AttentionInputs(query, key, value, scale=0.125, is_causal=True)
    config = fp8_configs.config_of(64)
    wanted = quantised.quantise_fp8(query, key, value, scale=0.125)
    exact, _ = quantised.quantised_attention(query, key, value, scale=0.125, is_causal=True)
    with hopper_on_host.running_on(machine, monkeypatch):
        operands = fp8_launch.quantise(inputs, config, True, False, 0)
        out, _, _ = fp8_launch.forward(inputs)
    exact = exact.clamp(-65504, 65504)
    assert not out.isinf().any()
    assert not any(selftest_fp8.differences(operands, wanted, inputs).values())
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.allclose(out.double(), exact, rtol=0.05, atol=0.05 * exact.nan_to_num().abs().max(), equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [72, 96, 128, 160, 192, 256, 320, 384, 512])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_every_tile_passes_on_the_model(machine, monkeypatch, head_dim, dtype):
    judge(machine, monkeypatch, Check(dtype, head_dim, 300, 520, **SMALL), head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 512])
@pytest.mark.parametrize("feature", selftest_fp8._FEATURES, ids=lambda feature: "-".join(map(str, feature.values())))
def test_every_feature_passes_on_the_model(machine, monkeypatch, head_dim, feature):
    check = replace(Check(BF16, head_dim), **feature)
    judge(machine, monkeypatch, replace(check, q_len=min(check.q_len, 400), kv_len=min(check.kv_len, 530)))
