"""Every Triton kernel compiles ahead of time for GPUs that are not here, inside their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from ffpa_hf.kernels.triton import configs  # noqa: E402

WITHOUT_PRODUCTS = ("row_delta", "key_reach")
ROOT = Path(__file__).resolve().parents[2]


def compiled(backend, arch, *calls):
    """What `triton_ahead` printed: one dict for each kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    script = Path(__file__).with_name("triton_ahead.py")
    run = subprocess.run(
        [sys.executable, str(script), backend, str(arch), *calls],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def check_memory(rows, target):
    for row in rows:
        assert row["shared"] <= target.smem_limit, row
        assert row["binary_bytes"] > 0


def test_hopper_kernels_use_its_matrix_units_and_descriptors():
    rows = compiled("cuda", 90, "72,window,bias,softcap,sinks,dropout", "512,wide,causal,groups", "256,window,groups")
    check_memory(rows, configs.target_for((9, 0)))
    names = {row["kernel"] for row in rows}
    assert names == {
        "attention_forward", "forward_scores", "forward_product", "row_delta", "backward_scores", "gradient_query",
        "gradient_key", "gradient_bias", "key_reach", "gradient_key_value",
    }  # fmt: skip
    for row in rows:
        if row["kernel"] not in WITHOUT_PRODUCTS:
            assert row["wgmma"] > 0 and row["tma"] > 0 and row["mma"] == 0, row


def test_the_same_source_compiles_without_descriptors():
    rows = compiled("cuda", 89, "320,causal,mask,fp16", "128,window")
    assert "gradient_key_value" in {row["kernel"] for row in rows}
    check_memory(rows, configs.target_for((8, 9)))
    for row in rows:
        assert row["wgmma"] == 0 and row["tma"] == 0
        assert (row["mma"] > 0) == (row["kernel"] not in WITHOUT_PRODUCTS), row


def test_decoding_compiles_with_and_without_splits():
    calls = "512,decode,groups", "128,decode,single,bias,softcap", "72,decode,window,sinks,dropout,fp16"
    rows = [row for row in compiled("cuda", 90, *calls) if row["kernel"].startswith("decode")]
    check_memory(rows, configs.target_for((9, 0)))
    assert [row["kernel"] for row in rows] == ["decode_split", "decode_combine"] + ["decode_split"] * 2 + [
        "decode_combine"
    ]
    assert all((row["mma"] > 0) == (row["kernel"] == "decode_split") for row in rows)


QKV = ("128,qkv", "128,qkv,across,complex", "72,qkv,halves,fp16")


@pytest.mark.parametrize(("backend", "arch"), [("cuda", 80), ("cuda", 90), ("cuda", 120), ("hip", "gfx942")])
def test_queries_and_keys_are_normalised_and_rotated_on_every_target(backend, arch):
    rows = compiled(backend, arch, *QKV)
    check_memory(rows, configs.target_for(None if backend == "hip" else divmod(arch, 10), backend == "hip"))
    assert [row["kernel"] for row in rows] == ["place_stream"] * 6
    assert not any(row.get("spilled_bytes") for row in rows), rows


FEATURES = ("", ",causal,groups", ",window,sinks", ",mask,softcap,fp16", ",bias,dropout")
TARGETS = [
    ("cuda", 80),
    ("cuda", 89),
    ("cuda", 90),
    ("cuda", 100),
    ("cuda", 120),
    ("hip", "gfx942"),
    ("hip", "gfx1100"),
]


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256, 320, 512, 1024])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_target_and_feature_compiles(target, head_dim):
    backend, arch = target
    rows = compiled(backend, arch, *(f"{head_dim}{features}" for features in FEATURES))
    limits = configs.target_for(None if backend == "hip" else divmod(arch, 10), backend == "hip")
    check_memory(rows, limits)
