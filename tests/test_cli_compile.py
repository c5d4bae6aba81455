"""`ffpa-hf compile`: kernels for GPUs that are not here end up where calls look for them."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from ffpa_hf import cli_compile
from ffpa_hf.cli import app

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--arch", "sm_90"], "sm_90a"),
        (["--arch", ","], "nothing is named"),
        (["--arch", "sm_80", "--head-dims", "70"], "multiples of 8"),
        (["--arch", "sm_80", "--head-dims", "2048"], "multiples of 8"),
        (["--arch", "sm_80", "--precision", "fp8"], "bf16, fp16"),
        (["--arch", "sm_80", "--backend", "triton"], "only cuda"),
    ],
)
def test_a_wrong_argument_says_what_is_right(arguments, named):
    result = runner.invoke(app, ["compile", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and named in result.output


def test_no_compiler_is_said(monkeypatch):
    monkeypatch.setattr("ffpa_hf.kernels.cuda._try_import", lambda: "ImportError: no nvrtc")
    result = runner.invoke(app, ["compile", "--arch", "sm_80"])
    assert result.exit_code == 2 and "no nvrtc" in result.stderr


def test_hopper_gets_both_forwards_where_it_has_both():
    names = [variant.name for variant in cli_compile.variants(["sm_90a"], [128, 512, 640], ["bf16"])]
    assert (names.count("tma_forward"), names.count("twin_forward"), names.count("native_forward")) == (6, 6, 18)


def test_compiled_kernels_are_those_that_calls_ask_for(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc", reason="pip install 'ffpa-hf[cuda]' brings NVRTC")
    from ffpa_hf import settings
    from ffpa_hf.kernels.cuda import launch, program

    monkeypatch.setenv("FFPA_CACHE_DIR", str(tmp_path))  # of the worker processes
    with settings.override(cache_dir=str(tmp_path)):
        arguments = ["compile", "--arch", "sm_80", "--head-dims", "64", "--precision", "fp16", "--json"]
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        assert told == {"kernels": 6, "failed": {}, "directory": str(tmp_path / "compiled")}
        monkeypatch.setattr(program, "_compile", lambda variant: pytest.fail("compiled again"))
        program.compile_variant(launch.native_variant(64, torch.float16, (8, 0), causal=True))
