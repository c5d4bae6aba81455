"""Results files: merged, read back, and turned into README's tables. Nothing is timed."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from ffpa_hf.bench import cases, results, summary
from ffpa_hf.bench.results import Results, Row
from ffpa_hf.cli import app

VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}


def row(case, direction, provider, ms, base=None, **more):
    ratio = None if ms is None or base is None else base / ms
    known = {each.id: each for each in cases.KERNEL}
    flops = known[case].flops(direction) / ms / 1e9 if ms and case in known else None
    return Row(case, direction, provider, ms=ms, tflops=flops, speedup_vs_sdpa=ratio, **more)


def run_of(*rows, date="2026-12-01T01:00:00+00:00", command="ffpa-hf bench", **more):
    fields = {"device": "NVIDIA H200", "date": date, "command": command, "versions": VERSIONS, "matmul_tflops": 700.0}
    return Results(**{**fields, "rows": list(rows), **more})


def pair(case="d512_self_8k", direction="fwd", sdpa=30.0, ours=8.0, provider="ffpa_hf/triton"):
    return row(case, direction, "sdpa", sdpa, sdpa), row(case, direction, provider, ours, sdpa)


def invoke(*arguments, code=0):
    done = CliRunner().invoke(app, [str(each) for each in arguments], prog_name="ffpa-hf")
    assert done.exit_code == code, done.output
    return done.output


# --- merge ------------------------------------------------------------------------------------------------------------


def test_parts_of_a_run_become_one_file_with_both_commands(tmp_path):
    first = run_of(*pair("d512_self_8k"), command="ffpa-hf bench --cases a")
    second = run_of(*pair("d640_self_4k"), command="ffpa-hf bench --cases b", date="2026-12-01T02:00:00+00:00")
    second.matmul_tflops, second.copy_tb_s = 710.0, 4.2
    first.write(tmp_path / "a.json")
    second.write(tmp_path / "b.json")
    invoke("bench", "--merge", tmp_path / "a.json", tmp_path / "b.json", "--name", "both", "--output", tmp_path / "m")
    merged = results.load(tmp_path / "m" / "2026-12-01-h200-both.json")
    assert merged.rows == first.rows + second.rows
    assert merged.command.splitlines() == ["ffpa-hf bench --cases a", "ffpa-hf bench --cases b"]
    assert merged.date == second.date and merged.versions == VERSIONS
    assert (merged.matmul_tflops, merged.copy_tb_s) == (710.0, 4.2)
    assert results.merge([merged, first]).command == merged.command, "a command is named once"


def test_a_row_that_failed_in_one_run_is_taken_from_the_one_that_timed_it():
    failed = row("d512_self_8k", "fwd", "ffpa_hf/triton", None, note="out of memory")
    merged = results.merge([run_of(row("d512_self_8k", "fwd", "sdpa", 30.0, 30.0), failed), run_of(*pair(sdpa=31.0))])
    sdpa, ours = merged.rows
    assert sdpa.ms == 30.0 and ours.ms == 8.0
    assert ours.speedup_vs_sdpa == 31.0 / 8.0 and ours.note == results.OTHER_RUN, "a ratio is never across runs"
    assert results.merge([merged]).rows == merged.rows


def test_rows_of_one_case_stand_together_and_directions_apart():
    first = run_of(*pair(), *pair(direction="bwd", sdpa=240.0, ours=18.0))
    second = run_of(*pair(provider="ffpa_hf/cuda"))
    keys = [(each.direction, each.provider) for each in results.merge([first, second]).rows]
    assert keys == [
        ("fwd", "sdpa"), ("fwd", "ffpa_hf/triton"), ("fwd", "ffpa_hf/cuda"), ("bwd", "sdpa"), ("bwd", "ffpa_hf/triton")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [({"device": "NVIDIA H100"}, "H100"), ({"versions": {**VERSIONS, "triton": "3.7.0"}}, "triton 3.6.0 and 3.7.0"),
     ({"versions": {"torch": "2.11.0"}}, "triton 3.6.0 and missing")],
)  # fmt: skip
def test_runs_that_are_not_of_one_machine_are_refused(tmp_path, change, named):
    other = dataclasses.replace(run_of(*pair()), **change)
    with pytest.raises(ValueError, match=named):
        results.merge([run_of(*pair()), other])
    with pytest.raises(ValueError, match="nothing|no results"):
        results.merge([])


def test_merge_names_the_wrong_file(tmp_path):
    good = tmp_path / "good.json"
    run_of(*pair()).write(good)
    assert "two or more" in invoke("bench", "--merge", good, code=2)
    assert "--merge" in invoke("bench", good, code=2)
    assert "nowhere.json" in invoke("bench", "--merge", good, tmp_path / "nowhere.json", code=2)
    for content in ("", "[]", "{}", '{"rows": [{"check": 1}]}', json.dumps({"rows": 3})):
        bad = tmp_path / "bad.json"
        bad.write_text(content)
        assert "no results file" in invoke("bench", "--merge", good, bad, code=2).replace("\n", " ")


# --- README's tables --------------------------------------------------------------------------------------------------


def test_the_table_has_a_line_per_case_with_the_fastest_in_bold():
    text, used = summary.kernels([run_of(*pair(), *pair(direction="bwd", sdpa=240.0, ours=18.0))])
    lines = text.splitlines()
    assert lines[0] == "| case | PyTorch SDPA | ffpa_hf, Triton | ours against SDPA |"
    assert lines[2] == "| D=512, 32 heads, 8k | 147 / 46 | **550** / **611** | 3.8x / 13.3x |"
    assert len(lines) == 3, "what was not measured is left out"
    assert len(used) == 1


def test_a_case_is_taken_whole_from_the_newest_run_that_has_sdpa():
    old = run_of(*pair(sdpa=30.0, ours=10.0), row("d512_self_8k", "fwd", "fa4", 9.0, 30.0))
    new = run_of(*pair(sdpa=20.0, ours=8.0), date="2026-12-02T00:00:00+00:00")
    alone = run_of(row("d512_self_8k", "fwd", "ffpa_hf/triton", 1.0), date="2026-12-03T00:00:00+00:00")
    elsewhere = dataclasses.replace(run_of(*pair(ours=2.0), date="2026-12-01T00:00:00+00:00"), device="NVIDIA A100")
    text, used = summary.kernels([old, new, alone, elsewhere])
    assert used == [new]
    assert "FlashAttention-4" not in text and "2.5x" in text


def test_units_follow_the_case():
    decode = pair("d512_decode_8k", sdpa=1.2, ours=0.025)
    window = pair("d256_window1k_8k", sdpa=8.0, ours=0.5)
    text, _ = summary.kernels([run_of(*decode, *window)])
    assert "| 1200 us | **25 us** | 48.0x |" in text
    assert "| 8 ms | **0.5 ms** | 16.0x |" in text


def test_a_failed_row_is_a_dash_and_slower_is_said():
    failed = row("d512_self_8k", "bwd", "ffpa_hf/triton", None, note="out of memory")
    text, _ = summary.kernels([run_of(*pair(ours=40.0), row("d512_self_8k", "bwd", "sdpa", 240.0, 240.0), failed)])
    assert "| **147** / **46** | 110 / - | 0.75x / - |" in text


def test_models_are_named_by_job_and_direction():
    rows = [row("generate_8k", way, name, ms, 100.0) for way in ("prefill", "decode") for name, ms in
            (("sdpa", 100.0), ("ffpa_hf/auto", 50.0))]  # fmt: skip
    text, _ = summary.models([run_of(*rows)])
    assert "to the first token | 100 ms | **50 ms** | 2.0x |" in text and "each token after it" in text
    assert summary.models([run_of(*pair())]) == ("", []) == summary.kernels([run_of(*rows)])
    assert summary.kernels([]) == ("", [])
