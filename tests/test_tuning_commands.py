"""`ffpa-hf record` and `ffpa-hf autotune` as a user types them, and the recorded run between them. No GPU is needed."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
from typer.testing import CliRunner

import ffpa_hf
from ffpa_hf import cli, cli_tuning, settings
from ffpa_hf.bench import cases, sweep
from ffpa_hf.bench.results import Row
from ffpa_hf.call import AttentionCall
from ffpa_hf.cli import app
from ffpa_hf.kernels.triton import choice
from ffpa_hf.kernels.tuning import preferences, recording, tiles, triton_tuner
from ffpa_hf.report import CallSite

runner = CliRunner()
GPU = "NVIDIA H200"


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, list(arguments), prog_name="ffpa-hf")
    assert result.exit_code == code, result.output
    return result.output


SCRIPT = """
import sys, torch, ffpa_hf
q = torch.randn(1, 8, 600, 64, dtype=torch.bfloat16)
k = torch.randn(1, 2, 600, 64, dtype=torch.bfloat16, requires_grad=True)
ffpa_hf.ffpa_attn_func(q, k, k, is_causal=True, enable_gqa=True)
with torch.no_grad():
    for length in range(513, 518):
        ffpa_hf.ffpa_attn_func(q[:, :, :1], k[:, :, :length], k[:, :, :length], enable_gqa=True)
print("arguments", sys.argv[1:])
sys.exit({code})
"""


@pytest.fixture
def recorded(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.replace("{code}", "0"))
    path = tmp_path / "out" / "calls.json"
    run("record", "--output", str(path), str(script))
    return path


# --- record -----------------------------------------------------------------------------------------------------------


def test_a_recorded_program_gets_its_own_arguments_and_exit_code(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.replace("{code}", "3"))
    before = list(sys.argv), list(sys.path)
    output = run("record", "--output", str(tmp_path / "calls.json"), str(script), "--steps", "3", "x", code=3)
    assert "arguments ['--steps', '3', 'x']" in output and "calls written to" in output
    assert (sys.argv, sys.path) == before


def test_calls_of_neighbouring_lengths_are_one_entry_with_the_longest(recorded):
    loaded = recording.load(recorded)
    assert [(c.q_len, c.kv_len, c.is_causal, c.needs_grad, n) for c, n in loaded] == [
        (1, 517, False, False, 5), (600, 600, True, True, 1)
    ]  # fmt: skip
    assert loaded[0][0].dtype == torch.bfloat16 and loaded[0][0].kv_heads == 2


def test_a_program_that_fails_leaves_what_it_called(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.replace("sys.exit({code})", "raise KeyError('lost')"))
    result = runner.invoke(app, ["record", "--output", str(tmp_path / "calls.json"), str(script)])
    assert isinstance(result.exception, KeyError)
    assert len(recording.load(tmp_path / "calls.json")) == 2


def test_a_program_without_attention_writes_nothing(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("pass")
    assert "no attention call" in run("record", "--output", str(tmp_path / "calls.json"), str(script))
    assert not (tmp_path / "calls.json").exists()


def test_a_module_can_be_recorded(tmp_path, monkeypatch):
    (tmp_path / "some_program.py").write_text(SCRIPT.replace("{code}", "0"))
    monkeypatch.chdir(tmp_path)
    run("record", "-m", "--output", "calls.json", "some_program")
    assert len(recording.load(tmp_path / "calls.json")) == 2


def test_recorded_calls_as_json_follow_the_program(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.replace("{code}", "0"))
    done = runner.invoke(app, ["record", "--json", "--output", str(tmp_path / "calls.json"), str(script)])
    program, _, content = done.stdout.partition("\n")
    assert program == "arguments []"
    rows = json.loads(content)["rows"]
    assert sorted(row["calls"] for row in rows) == [1, 5] and {row["backend"] for row in rows} == {"sdpa"}


def test_recorded_shapes_are_timed_and_the_fastest_is_named(tmp_path, monkeypatch):
    def rows(cases, providers, gathered, *rest):
        for case in cases:
            slow = 2.0 if case.q_len == 1 else 8.0
            for name, ms in (("sdpa", slow), ("ffpa_hf/sdpa", 7.0), ("ffpa_hf/triton", 3.0), ("ffpa_hf/cuda", None)):
                gathered.rows += [Row(case.id, direction, name, ms=ms) for direction in ("fwd", "fwd+bwd")]

    monkeypatch.setattr(cli_tuning, "_run_sweep", rows)
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.replace("{code}", "0"))
    done = runner.invoke(app, ["record", "--time", "--json", "--output", str(tmp_path / "calls.json"), str(script)])
    timed = json.loads(done.stdout.partition("\n")[2])["timed"]
    square, decode = "sweep_d64_h8_g4_q600_k600_causal", "sweep_d64_h8_g4_q1_k517_none"
    assert [(row["case"], row["direction"], row["calls"], row["ms"], row["fastest"]) for row in timed] == [
        (decode, "fwd", 5, 2.0, "sdpa"), (square, "fwd+bwd", 1, 7.0, "triton")
    ]  # fmt: skip
    assert "5 calls by sdpa: 2 ms each, nothing is faster" in done.stderr
    assert "1 calls by sdpa: 7 ms each; triton would take 3 ms" in done.stderr


def test_recorded_shapes_are_really_timed(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import torch, ffpa_hf\nq = torch.randn(1, 2, 32, 64, dtype=torch.bfloat16)\nffpa_hf.ffpa_attn_func(q, q, q)"
    )
    done = runner.invoke(app, ["record", "--time", "--json", "--output", str(tmp_path / "calls.json"), str(script)])
    (row,) = json.loads(done.stdout)["timed"]
    assert row["backend"] == "sdpa" and row["ms"] > 0 and row["fastest_ms"] > 0


def test_what_autotune_would_measure_as_json(recorded):
    done = runner.invoke(app, ["autotune", "--list", "--json", "--shapes-from", str(recorded)])
    content = json.loads(done.stdout)
    assert done.exit_code == 0 and content["tiles"] and content["auto"]
    assert "--list" in run("autotune", "--json", code=2)


def test_a_missing_script_is_named():
    assert "nowhere.py" in run("record", "nowhere.py", code=2)


def test_a_report_of_a_model_can_be_saved(tmp_path):
    class Attention(torch.nn.Module):
        def forward(self, x):
            from ffpa_hf.functional import attend

            return attend(x, x, x, site=self)

    model = torch.nn.Sequential(Attention())
    model(torch.randn(1, 2, 9, 64))
    ffpa_hf.report(model).save(tmp_path / "calls.json")
    content = json.loads((tmp_path / "calls.json").read_text())
    assert [(row["module"], row["backend"], row["calls"]) for row in content["rows"]] == [("0", "sdpa", 1)]
    ((call, _),) = recording.load(tmp_path / "calls.json")
    assert (call.q_len, call.head_dim, call.dtype) == (9, 64, torch.float32)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "x", "rows": []}', '{"format": "ffpa_hf calls", "rows": [{"call": {}}]}']
)
def test_a_file_that_is_no_recorded_run_is_named(tmp_path, content):
    path = tmp_path / "calls.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="no recorded run"):
        recording.load(path)
    assert "--shapes-from" in run("autotune", "--shapes-from", str(path), code=2)


def test_a_call_survives_the_file(tmp_path):
    call = AttentionCall(
        1, 4, 2, 8, 9, 64, 64, torch.float16, capability=(9, 0), device_name=GPU, mask_kind="additive", has_bias=True,
        bias_dtype=torch.float32, softcap=5.0, needs_grad=True,
    )  # fmt: skip
    site = CallSite("m", "M", "s", "triton", "triton", "why", 3, call, ((8, 9, 3),))
    ffpa_hf.Report([site]).save(tmp_path / "calls.json")
    assert recording.load(tmp_path / "calls.json") == [(call, 3)]


# --- shapes of a recorded run -----------------------------------------------------------------------------------------

CALL = AttentionCall(2, 8, 2, 4096, 4096, 512, 512, torch.bfloat16, is_causal=True, needs_grad=True)


def replaced(**changes):
    return dataclasses.replace(CALL, **changes)


def test_buckets_of_calls_are_those_that_triton_serves():
    found = triton_tuner.buckets_of(
        [CALL, CALL, replaced(q_len=4100), replaced(needs_grad=False, head_dim=128, value_dim=128),
         replaced(head_dim=40, value_dim=40), replaced(dtype=torch.float32), replaced(q_len=0), replaced(value_dim=64)]
    )  # fmt: skip
    assert [(bucket.direction, bucket.head_dim, bucket.lanes, bucket.group) for bucket in found] == [
        ("forward", 512, 16, 4), ("backward", 512, 16, 4), ("forward", 128, 16, 4)
    ]  # fmt: skip
    assert len(set(triton_tuner.default_buckets())) == len(triton_tuner.default_buckets()) > 60


def test_cases_of_calls_are_those_that_auto_looks_up():
    intervals = replaced(is_causal=False, mask_kind="intervals")
    found = cases.sweep_cases_of(
        [CALL, CALL, intervals, replaced(is_causal=False, mask_kind="intervals", q_len=1), replaced(softcap=3.0),
         replaced(is_causal=False, mask_kind="additive", has_bias=True), replaced(dropout_p=0.1), replaced(batch=0)]
    )  # fmt: skip
    assert [case.id for case in found] == [
        "sweep_d512_h16_g4_q4096_k4096_causal",
        "sweep_d512_h16_g4_q4096_k4096_padded",
        "sweep_d512_h16_g4_q4096_k4096_window",
        "sweep_d512_h16_g4_q1_k4096_padded",
    ]
    assert all(preferences._place_of(case.id) is not None for case in found)


# --- autotune ---------------------------------------------------------------------------------------------------------


def test_without_a_gpu_there_is_nothing_to_tune(no_interpreter):
    assert "No GPU" in run("autotune", "--device", "cpu", code=2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("--mode", "slow"), "--mode"), (("--only", "peers"), "--only"), (("--shapes-from", "/nowhere"), "--shapes-from")],
)
def test_autotune_names_the_wrong_argument(arguments, named):
    assert named in run("autotune", "--device", "cpu", "--list", *arguments, code=2)


class FakeGpu:
    type = "cuda"

    def __str__(self):
        return "cuda:0"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that is only a name: tuning and timing are made up and written down."""
    done: dict[str, list] = {"tiles": [], "auto": []}

    def tune(bucket, device, mode, **_):
        done["tiles"].append((bucket.key, mode))
        ruled = choice.by_rule(bucket.direction, triton_tuner.problem_of(bucket), choice.configs.target_for((9, 0)))
        return {"tiles": choice.encode(ruled), "ms": 1.0, "rule_ms": 1.5, "tried": 4, "mode": mode, "date": "d"}

    def sweep_run(chosen, providers, gathered, device, **_):
        done["auto"] += [case.id for case in chosen]
        for case in chosen:
            for way in sweep.DIRECTIONS:
                gathered.rows += [Row(case.id, way, "sdpa", ms=2.0), Row(case.id, way, "ffpa_hf/triton", ms=1.0)]
        return []

    probe = cli._probe
    monkeypatch.setattr(cli, "_device", lambda name: FakeGpu())
    monkeypatch.setattr(cli, "_probe", lambda device: probe(torch.device("cpu"), device_name=GPU))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(triton_tuner, "tune", tune)
    monkeypatch.setattr(sweep, "run", sweep_run)
    monkeypatch.setattr(sweep, "providers_for_table", lambda device: ("sdpa", "ffpa_hf/triton"))
    monkeypatch.setattr(cli_tuning, "_in_workers", lambda *_: None)
    monkeypatch.setattr(tiles, "_TABLES", tmp_path / "none")
    monkeypatch.setattr(preferences, "_TABLES", tmp_path / "none")
    with settings.override(cache_dir=str(tmp_path / "kept")):
        choice.forget()
        preferences.forget()
        yield done
    choice.forget()
    preferences.forget()


def test_a_recorded_run_is_tuned_and_both_tables_are_read_by_later_calls(gpu, recorded):
    output = run("autotune", "--shapes-from", str(recorded))
    assert "1.50 times the rule's speed" in output and "2 shapes kept in" in output
    assert [mode for _, mode in gpu["tiles"]] == ["fast"] * 3 and len(gpu["auto"]) == 2
    assert tiles.counts(GPU)[0] == 3
    call = AttentionCall(
        1, 8, 2, 600, 600, 64, 64, torch.bfloat16, capability=(9, 0), device_name=GPU, is_causal=True
    )  # fmt: skip
    assert preferences.prefer(call) == ("triton", "sdpa")


def test_what_was_measured_is_left_out_the_next_time(gpu, recorded):
    run("autotune", "--shapes-from", str(recorded))
    gpu["tiles"].clear(), gpu["auto"].clear()
    assert "0 buckets of tiles and 0 shapes" in run("autotune", "--shapes-from", str(recorded))
    assert gpu == {"tiles": [], "auto": []}
    run("autotune", "--shapes-from", str(recorded), "--mode", "max")
    assert [mode for _, mode in gpu["tiles"]] == ["max"] * 3 and gpu["auto"] == []
    run("autotune", "--shapes-from", str(recorded), "--mode", "max", "--again", "--only", "auto")
    assert len(gpu["tiles"]) == 3 and len(gpu["auto"]) == 2


def test_an_interrupted_run_goes_on_where_it_stopped(gpu, recorded, monkeypatch):
    real, calls = triton_tuner.tune, []

    def interrupted(bucket, device, mode, **more):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(bucket)
        return real(bucket, device, mode, **more)

    monkeypatch.setattr(triton_tuner, "tune", interrupted)
    assert runner.invoke(app, ["autotune", "--shapes-from", str(recorded)]).exit_code != 0
    monkeypatch.setattr(triton_tuner, "tune", real)
    assert "2 buckets of tiles" in run("autotune", "--shapes-from", str(recorded))


def test_no_bucket_begins_after_the_time_is_up(gpu, recorded):
    output = run("autotune", "--shapes-from", str(recorded), "--minutes", "0")
    assert "5 left for lack of time" in output and gpu == {"tiles": [], "auto": []}


def test_a_bucket_that_fails_is_said_and_the_others_go_on(gpu, recorded, monkeypatch):
    real = triton_tuner.tune

    def tune(bucket, device, mode, **more):
        if bucket.direction == "backward":
            raise torch.OutOfMemoryError("no room")
        return real(bucket, device, mode, **more)

    monkeypatch.setattr(triton_tuner, "tune", tune)
    output = run("autotune", "--shapes-from", str(recorded), "--only", "tiles")
    assert "not tuned (OutOfMemoryError: no room)" in output and tiles.counts(GPU)[0] == 2


def test_list_measures_nothing(gpu, recorded):
    output = run("autotune", "--shapes-from", str(recorded), "--list")
    assert "sweep_d64_h8_g4_q600_k600_causal" in output and "forward d64 lanes4 group4 512x512 causal" in output
    assert gpu == {"tiles": [], "auto": []}
