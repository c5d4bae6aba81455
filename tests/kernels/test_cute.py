"""The CuTe-DSL forward without a GPU: rules, host arguments, tiles, cache key; with the DSL also what is compiled."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ffpa_hf import CuTeDSLBackend, dispatch, settings
from ffpa_hf.call import AttentionCall
from ffpa_hf.dispatch import Route
from ffpa_hf.kernels import cute, qualification, selftest
from ffpa_hf.kernels.common import Accepted, AttentionInputs
from ffpa_hf.kernels.cute import configs, launch

CALL = AttentionCall(1, 4, 4, 1024, 1024, 256, 256, torch.bfloat16, "cuda", (9, 0), device_name="NVIDIA H200")
EVERY = range(configs.HEAD_DIMS[0], configs.HEAD_DIMS[1] + 1, 8)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(cute, "_installed", lambda: True)
    dispatch.forget_plans()
    yield
    dispatch.forget_plans()


def changed(**changes) -> AttentionCall:
    return dataclasses.replace(CALL, **changes)


@pytest.mark.parametrize("head_dim", EVERY)
def test_dense_and_causal_forwards_are_served(installed, head_dim):
    for dtype in (torch.float16, torch.bfloat16):
        call = changed(head_dim=head_dim, value_dim=head_dim, dtype=dtype, is_causal=True, return_lse=True)
        assert isinstance(cute.supports(call), Accepted)


@pytest.mark.parametrize(
    ("changes", "kind", "error", "words"),
    [
        ({"softcap": 30.0}, "unqualified", NotImplementedError, "softcap"),
        ({"has_sinks": True}, "unqualified", NotImplementedError, "sinks"),
        ({"mask_kind": "bool"}, "unqualified", NotImplementedError, "'bool'"),
        ({"mask_kind": "intervals"}, "unqualified", NotImplementedError, "'intervals'"),
        ({"mask_kind": "intervals", "varlen": True}, "unqualified", NotImplementedError, "'intervals'"),
        ({"mask_kind": "additive", "has_bias": True}, "error", NotImplementedError, "additive"),
        ({"dropout_p": 0.1}, "error", NotImplementedError, "dropout"),
        ({"dtype": torch.float32}, "error", TypeError, "float32"),
        ({"head_dim": 328, "value_dim": 328}, "fallback", ValueError, "64 to 320"),
        ({"head_dim": 100, "value_dim": 100}, "fallback", ValueError, "multiples of 8"),
        ({"capability": (8, 0)}, "fallback", RuntimeError, "sm_90"),
        ({"capability": (10, 0)}, "fallback", RuntimeError, "sm_90"),
        ({"is_rocm": True}, "fallback", RuntimeError, "sm_90"),
    ],
)
def test_what_it_lacks_is_refused_by_name(installed, changes, kind, error, words):
    answer = cute.supports(changed(**changes))
    assert not isinstance(answer, Accepted) and answer.kind == kind and answer.error is error
    assert words in answer.reason


def test_backward_and_other_targets_are_not_built(installed):
    assert "backward" in cute.supports(CALL, backward=True).reason
    for target in ("sm_80", "sm_100a"):
        assert target in cute.supports(CALL, CuTeDSLBackend(target=target)).reason
    assert isinstance(cute.supports(CALL, CuTeDSLBackend(target="sm_90a")), Accepted)


def test_without_the_dsl_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(cute, "_installed", lambda: False)
    answer = cute.supports(CALL)
    assert answer.rule == "package" and "ffpa-hf[cute]" in answer.reason


def test_it_runs_nowhere_before_its_self_test_passed(installed):
    assert "cute" not in qualification.shipped()
    with settings.override(allow_unqualified=False):
        dispatch.forget_plans()
        made = dispatch.plan(CALL, Route("cute", strict=True))
        assert isinstance(made.error, RuntimeError) and "ffpa-hf selftest" in str(made.error)
        assert dispatch.plan(CALL).forward != "cute"


def test_behind_it_comes_the_triton_backward(installed):
    with settings.override(allow_unqualified=True):
        dispatch.forget_plans()
        made = dispatch.plan(changed(needs_grad=True), Route("cute", strict=True))
    assert made.error is None and (made.forward, made.backward) == ("cute", "triton")


@pytest.mark.parametrize("head_dim", EVERY)
def test_tiles_fit_shared_memory_and_the_instructions(head_dim):
    config = configs.choose(head_dim, "bfloat16", False)
    assert config.smem <= configs.SMEM_LIMIT
    assert config.width >= head_dim and config.width % config.value_n == 0 and config.value_n % 64 == 0
    assert config.block_n % 16 == 0 and config.block_n <= 256
    accumulators = config.width // 2 + config.block_n // 2 + config.block_n // 4
    assert accumulators <= 216, "of 240 registers"


@pytest.mark.parametrize("head_dim", [56, 68, 328, 512])
def test_other_head_dims_have_no_tile(head_dim):
    with pytest.raises(ValueError, match="64 to 320"):
        configs.choose(head_dim, "bfloat16", False)


def test_broadcast_and_odd_strides_reach_the_kernel_without_a_stride_of_zero():
    query = torch.zeros(2, 8, 40, 64, dtype=torch.float16)[:, :1].expand(2, 8, 40, 64)
    key = torch.zeros(1, 1, 50, 64, dtype=torch.float16).expand(2, 2, 50, 64)
    value = torch.zeros(2, 50, 2, 64, dtype=torch.float16).transpose(1, 2)
    out, lse = torch.empty(2, 8, 40, 64, dtype=torch.float16), torch.empty(2, 8, 40)
    given = launch.arguments(AttentionInputs(query, key, value, scale=0.0), out, lse)
    for tensor in given[:4]:
        assert all(stride > 0 for stride in tensor.stride()) and tensor.stride(-1) == 1
    assert given[1].shape == (1, 1, 50, 64) and given[7:9] == (0, 0)
    assert given[2].data_ptr() == value.data_ptr() and given[2].stride() == value.stride() and given[9:] == (1, 1)
    assert given[6] == 4


def test_a_head_of_size_one_may_have_any_stride():
    key = torch.zeros(50 * 64, dtype=torch.float16).as_strided((1, 1, 50, 64), (3, 7, 64, 1))
    query = torch.zeros(1, 4, 40, 64, dtype=torch.float16)
    given = launch.arguments(AttentionInputs(query, key, key, scale=1.0), query, torch.empty(1, 4, 40))
    assert all(stride % 8 == 0 for stride in given[1].stride()[:3])


def test_a_scale_of_zero_keeps_hidden_keys_hidden():
    slope = torch.tensor(launch.slope_of(0.0), dtype=torch.float32)
    assert slope != 0 and (slope * -torch.inf) == -torch.inf and torch.exp2(slope * 6e4) == 1
    assert launch.slope_of(-0.5) < 0


def test_no_key_gives_zeros_without_a_launch():
    query = torch.randn(1, 2, 9, 64, dtype=torch.float16)
    key = torch.empty(1, 2, 0, 64, dtype=torch.float16)
    out, lse, stats = launch.forward(AttentionInputs(query, key, key, scale=1.0))
    assert not out.any() and (lse == -torch.inf).all() and not stats.numel()


def test_the_cache_key_follows_config_target_and_release(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.8.1")
    config = configs.choose(64, "bfloat16", False)
    keys = {launch.key_of(config), launch.key_of(dataclasses.replace(config, causal=True))}
    keys.add(launch.key_of(config, "sm_100a"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.9.0")
    keys.add(launch.key_of(config))
    assert len(keys) == 4


def test_the_self_test_asks_only_for_what_is_served(installed):
    grid = selftest.grid_of("cute", is_hopper=True)
    assert grid and selftest.grid_of("cute") == ()
    assert {check.head_dim for check in grid} >= {64, 72, 128, 192, 256, 320}
    assert {check.mask for check in grid} == {"none", "causal"} and any(check.kv_len == 1 for check in grid)


_COMPILE = """
import sys
from pathlib import Path
from ffpa_hf.kernels.cute import build, configs
folder, head_dim, dtype, causal = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
build.compiled(configs.choose(head_dim, dtype, causal), options=f"--keep-cubin --dump-dir={folder}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "dtype", "causal"),
    [(64, "bfloat16", False), (72, "float16", True), (128, "bfloat16", True), (192, "float16", False),
     (256, "bfloat16", True), (320, "bfloat16", False), (320, "float16", True)],
)  # fmt: skip
def test_compiled_for_hopper_it_uses_tma_and_wgmma_without_spills(tmp_path, head_dim, dtype, causal):
    pytest.importorskip("cutlass", reason="needs the extra 'cute'")
    triton = pytest.importorskip("triton", reason="its wheel has nvdisasm")
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a"}
    command = [sys.executable, "-c", _COMPILE, str(tmp_path), str(head_dim), dtype, str(causal)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    (cubin,) = tmp_path.rglob("*.cubin")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    sass = subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    config = configs.choose(head_dim, dtype, causal)
    shapes = re.findall(r"HGMMA\.(\d+x\d+x\d+)", sass)
    assert f"64x{config.block_n}x16" in shapes and f"64x{config.value_n}x16" in shapes
    # The scores' products stand in front of the loop and in it, the values' in it and behind it.
    scores, values = config.width // 16, config.block_n // 16 * (config.width // config.value_n)
    assert len(shapes) == 2 * (scores + values)
    assert sass.count("UTMALDG") == 3 * config.width // 64, "boxes of 64 columns of query, keys and values"
    assert not re.search(r"\b(LDL|STL)\b", sass), "spilled"
    # Four waits and four groups of products were written; more would mean that the compiler put them one after another.
    assert sass.count("WARPGROUP.DEPBAR") == 4 and sass.count("WARPGROUP.ARRIVE") == 4
