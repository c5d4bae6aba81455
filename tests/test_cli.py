"""The command line as a user types it; no GPU is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from ffpa_hf import settings
from ffpa_hf.cli import app
from ffpa_hf.kernels import qualification, selftest_qkv
from ffpa_hf.kernels import selftest as selftest_module

runner = CliRunner()


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, list(arguments), prog_name="ffpa-hf")
    assert result.exit_code == code, result.output
    return result.output


def stdout(*arguments: str, code: int = 0) -> str:
    """What stands on standard output alone."""
    result = runner.invoke(app, list(arguments), prog_name="ffpa-hf")
    assert result.exit_code == code, result.output
    return result.stdout


def test_help_lists_what_works_and_only_that():
    output = run("--help")
    for command in ("info", "explain", "bench", "autotune", "record", "compile", "selftest", "demo"):
        assert command in output


def test_module_and_script_are_one_command_line():
    environ = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "ffpa_hf", "explain", "--shape", "1,2,600,64", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Attention B1 H2 N600 D64 bfloat16")


def test_a_default_backend_that_is_none_is_said_in_one_line():
    environ = {**os.environ, "FFPA_DEFAULT_BACKEND": "bogus"}
    command = [sys.executable, "-m", "ffpa_hf", "info"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("FFPA_DEFAULT_BACKEND='bogus' names no backend") and done.stderr.count("\n") == 1


def test_help_imports_neither_triton_nor_hugging_face():
    code = (
        "import sys; from typer.testing import CliRunner; from ffpa_hf.cli import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "heavy = ('triton', 'transformers', 'diffusers', 'rich.progress', 'ffpa_hf.bench'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_info_names_versions_backends_reasons_and_directories(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with settings.override(cache_dir=str(tmp_path / "kept")):
        output = run("info")
    assert torch.__version__ in output
    for backend in ("cute", "cuda", "triton", "sdpa"):
        assert backend in output
    assert output.count("the CuTe-DSL forward takes") == 1  # said with and without a GPU
    assert "nothing kept there yet" in output
    assert qualification.source_hash("triton") in output
    assert "FFPA_ALLOW_UNQUALIFIED" in output


def test_info_says_that_a_directory_is_not_private(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    tmp_path.chmod(0o777)
    with settings.override(cache_dir=str(tmp_path)):
        assert "others may write" in run("info")


def test_every_command_has_json_and_examples_that_parse():
    import shlex

    import typer

    commands = typer.main.get_command(app).commands
    for name, command in commands.items():
        flags = {flag for each in command.params for flag in each.opts}
        assert "--json" in flags or name == "demo", name  # which writes a page
        lines = re.findall(r"^\$ ffpa-hf (.+)$", command.epilog or "", flags=re.MULTILINE)
        assert lines, f"{name} has no example"
        for line in lines:
            words = shlex.split(line.partition(" > ")[0])
            assert words[0] == name
            command.make_context(name, list(words[1:]))  # raises on an option that is none


def test_info_as_json_is_json_alone(tmp_path):
    with settings.override(cache_dir=str(tmp_path / "kept")):
        content = json.loads(stdout("info", "--json"))
    assert set(content) == {"devices", "versions", "backends", "qualified", "files", "settings"}
    assert content["versions"]["torch"] == torch.__version__
    assert content["files"]["verdicts and tuned tables"] == str(tmp_path / "kept")
    assert {row["backend"] for row in content["backends"]} >= {"sdpa", "triton", "cuda"}


def test_explain_as_json_agrees_with_the_paragraph(no_interpreter):
    command = ("explain", "--shape", "1,32,8192,512", "--device", "cpu")
    content = json.loads(stdout(*command, "--json"))
    assert (content["forward"], content["error"]) == ("sdpa", None)
    text = run(*command)
    assert content["reason"] in text
    for candidate in content["candidates"]:
        assert f"{candidate['backend']:<9} " in text and candidate["reason"] in text
    wrong = json.loads(stdout(*command, "--dtype", "fp64", "--backend", "triton", "--json", code=1))
    assert wrong["error"].startswith("TypeError") and "forward" not in wrong


def test_selftest_as_json(monkeypatch, tmp_path):
    _outcomes(monkeypatch, True)
    with settings.override(triton_interpret=True, cache_dir=str(tmp_path / "kept")):
        contents = json.loads(stdout("selftest", "--device", "cpu", "--backend", "triton-qkv", "--json"))
    assert [content["family"] for content in contents] == ["triton-qkv"]
    assert contents[0]["cases"] == len(contents[0]["rows"]) > 0 and contents[0]["failed"] == 0


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_prints_the_plan_with_every_backend(no_interpreter):
    output = run("explain", "--shape", "1,32,8192,512", "--causal", "--device", "cpu")
    assert "B1 H32 N8192 D512 bfloat16 causal" in output
    assert "forward   sdpa" in output
    for backend in ("cute", "cuda", "triton"):
        assert f"\n  {backend}" in output


def test_explain_takes_other_key_shapes_and_dtypes():
    output = run(
        "explain", "--shape", "2,32,1024,512", "--kv-shape", "2x4x8192x512", "--dtype", "fp16", "--device", "cpu"
    )
    assert "H32:4 N1024x8192 D512 float16" in output


def test_explain_agrees_with_the_function():
    from ffpa_hf import explain as explain_function

    query = torch.randn(1, 4, 600, 64, dtype=torch.float16)
    plan = explain_function(query, query, query, is_causal=True, backend="triton")
    command = ("explain", "--shape", "1,4,600,64", "--dtype", "fp16", "--causal", "--backend", "triton", "--no-grad")
    assert run(*command, "--device", "cpu", code=int(plan.error is not None)).strip() == str(plan).strip()


def test_explain_exits_with_one_where_the_call_would_raise():
    output = run(
        "explain", "--shape", "1,4,600,64", "--dtype", "fp64", "--backend", "triton", "--device", "cpu", code=1
    )
    assert "raises TypeError" in output and "float64" in output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--shape", "1,2,3"), "--shape"),
        (("--shape", "1,2,3,x"), "--shape"),
        (("--shape", "1,2,3,-4"), "--shape"),
        (("--shape", "1,4,600,64", "--kv-shape", "1,3,600,64"), "--kv-shape"),
        (("--shape", "1,4,600,64", "--kv-shape", "1,0,600,64"), "--kv-shape"),
        (("--shape", "1,4,600,64", "--dtype", "int8"), "--dtype"),
        (("--shape", "1,4,600,64", "--mask", "alibi"), "--mask"),
        (("--shape", "1,4,600,64", "--mask", "bool", "--causal"), "--mask"),
        (("--shape", "1,4,600,64", "--backend", "tritonn"), "tritonn"),
        (("--shape", "1,4,600,64", "--dropout", "1.5"), "--dropout"),
        (("--shape", "1,4,600,64", "--softcap", "0"), "--softcap"),
        (("--shape", "1,4,600,64", "--device", "cuda:63"), "--device"),
        (("--shape", "1,4,600,64", "--device", "quantum"), "--device"),
    ],
)
def test_explain_names_the_wrong_argument(arguments, named):
    assert named in run("explain", *arguments, code=2)


# --- bench ------------------------------------------------------------------------------------------------------------


def test_bench_lists_cases_and_providers():
    output = run("bench", "--list")
    assert "d512_self_8k" in output and "cpu_smoke" in output and "ffpa-attn/triton" in output


def test_bench_on_a_cpu_writes_the_results_file(tmp_path):
    run("bench", "--cases", "cpu_self", "--providers", "sdpa,ffpa_hf/auto", "--seconds", "0.01", "--device", "cpu",
        "--name", "smoke test", "--output", str(tmp_path))  # fmt: skip
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    assert path.name == f"{content['date'][:10]}-cpu-smoke-test.json"
    assert [(row["direction"], row["provider"]) for row in content["rows"]] == [
        ("fwd", "sdpa"), ("fwd", "ffpa_hf/auto"), ("bwd", "sdpa"), ("bwd", "ffpa_hf/auto")
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in content["rows"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--cases", "d513*"), "d513*"),
        (("--providers", "tensorrt"), "tensorrt"),
        (("--directions", "sideways"), "sideways"),
    ],
)
def test_bench_names_the_wrong_argument(arguments, named):
    assert named in run("bench", "--device", "cpu", *arguments, code=2)


# --- selftest ---------------------------------------------------------------------------------------------------------


def test_selftest_without_a_gpu_says_so(no_interpreter):
    assert "No GPU" in run("selftest", "--device", "cpu", code=2)


def test_selftest_refuses_a_backend_without_kernels():
    assert "cute" in run("selftest", "--backend", "cute", code=2)


def test_selftest_without_the_compiler_tests_nothing(monkeypatch):
    monkeypatch.setattr(qualification, "compiler_version", lambda family: "triton missing")
    with settings.override(triton_interpret=True):
        assert "triton is not installed" in run("selftest", "--device", "cpu", code=2)


def _outcomes(monkeypatch, passed: bool) -> None:
    def check(module, config, check, device):
        return selftest_module.Outcome(check, passed, [("out", 0.1, 0.2 if passed else 0.05)])

    monkeypatch.setattr(selftest_module, "run_check", check)
    monkeypatch.setattr(selftest_qkv, "run_check", lambda wanted, device: check(None, None, wanted, device))


def test_selftest_exit_code_follows_the_checks(monkeypatch, tmp_path):
    with settings.override(triton_interpret=True, cache_dir=str(tmp_path / "kept")):
        _outcomes(monkeypatch, True)
        assert "checks passed" in run("selftest", "--device", "cpu")
        _outcomes(monkeypatch, False)
        assert "FAILED" in run("selftest", "--device", "cpu", code=1)
    assert not (tmp_path / "kept").exists(), "an interpreted run must keep no verdict"


def test_selftest_writes_what_can_be_recorded_only_after_a_gpu_run(monkeypatch, tmp_path):
    _outcomes(monkeypatch, True)
    path = tmp_path / "out" / "selftest.json"
    with settings.override(triton_interpret=True):
        run("selftest", "--device", "cpu", "--output", str(path))
    assert not path.exists(), "families overwrite each other's results"
    assert not path.with_name("selftest-cuda-fp8.json").exists(), "it has kernels for sm_90 alone"
    for family in set(qualification.FAMILIES) - {"cuda-fp8", "cute"}:
        written = path.with_name(f"selftest-{family}.json")
        content = json.loads(written.read_text())
        assert content["cases"] == len(content["rows"]) and content["failed"] == 0 and content["family"] == family
        with pytest.raises(ValueError, match="GPU"):
            qualification.record(written, tmp_path / "verdicts.json")


def test_selftest_of_kernels_for_another_gpu_says_so(tmp_path):
    with settings.override(triton_interpret=True, cache_dir=str(tmp_path)):
        assert "cuda-fp8 has no kernels for cpu" in run("selftest", "--device", "cpu", "--backend", "cuda-fp8", code=2)


def test_selftest_of_one_family_writes_the_file_it_was_given(monkeypatch, tmp_path):
    _outcomes(monkeypatch, True)
    path = tmp_path / "selftest.json"
    with settings.override(triton_interpret=True):
        run("selftest", "--device", "cpu", "--backend", "triton-qkv", "--output", str(path))
    assert json.loads(path.read_text())["family"] == "triton-qkv"
