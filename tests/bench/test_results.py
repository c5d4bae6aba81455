"""Results files: merged, compared, read back, and turned into tables, plots and a page."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ffpa_hf.bench import cases, plots, results, summary
from ffpa_hf.bench.results import Results, Row
from ffpa_hf.cli import app

ROOT = Path(__file__).parents[2]
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
    if code < 2:
        return done.output
    words = re.sub("[│─╭╮╰╯]", " ", done.output).split()
    return " ".join(words) + "\n" + "".join(words)  # a long path is broken over two lines


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


def test_files_alone_are_shown(files):
    assert "d512_self_8k" in invoke("bench", *files(a=run_of(*pair())))


def test_merge_names_the_wrong_file(tmp_path):
    good = tmp_path / "good.json"
    run_of(*pair()).write(good)
    assert "two or more" in invoke("bench", "--merge", good, code=2)
    assert "nowhere.json" in invoke("bench", "--merge", good, tmp_path / "nowhere.json", code=2)
    for content in ("", "[]", "{}", '{"rows": [{"check": 1}]}', json.dumps({"rows": 3})):
        bad = tmp_path / "bad.json"
        bad.write_text(content)
        assert "no results file" in invoke("bench", "--merge", good, bad, code=2)


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


# --- compare ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Writes runs under names and gives their paths."""

    def write(**runs):
        for name, run in runs.items():
            run.write(tmp_path / f"{name}.json")
        return [tmp_path / f"{name}.json" for name in runs]

    return write


def test_a_slower_row_is_marked_and_is_the_exit_code(files):
    old, new = files(old=run_of(*pair(ours=8.0)), new=run_of(*pair(ours=8.6)))
    assert "1 of 2 rows are worse by more than 5%" in invoke("bench", "--compare", old, new, code=1)
    assert "0 of 2 rows" in invoke("bench", "--compare", old, new, "--threshold", "8")
    assert "0 of 2 rows" in invoke("bench", "--compare", new, old)


def test_a_row_that_was_timed_and_now_fails_is_worse(files):
    failed = row("d512_self_8k", "fwd", "ffpa_hf/triton", None, note="out of memory")
    old, new = files(old=run_of(*pair()), new=run_of(row("d512_self_8k", "fwd", "sdpa", 30.0, 30.0), failed))
    output = invoke("bench", "--compare", old, new, code=1)
    assert "WORSE" in output and "out of memory" in output
    assert "0 of 2" in invoke("bench", "--compare", new, old), "what fails no more is no regress"


def test_a_comparison_as_json_has_both_ratios_and_the_versions(files):
    newer = run_of(*pair(sdpa=33.0, ours=8.0), versions={**VERSIONS, "triton": "3.7.0"})
    old, new = files(old=run_of(*pair(sdpa=30.0, ours=8.0)), new=newer)
    done = CliRunner().invoke(app, ["bench", "--json", "--compare", str(old), str(new)])
    content = json.loads(done.stdout)
    assert done.exit_code == 1 and content["device"] == "NVIDIA H200"
    assert content["compare"]["versions"] == {"triton": ["3.6.0", "3.7.0"]} and content["compare"]["worse"] == 1
    sdpa, ours = content["compare"]["rows"]
    assert sdpa["worse"] and sdpa["speed"] == pytest.approx(30 / 33)
    assert not ours["worse"] and (ours["old_times_sdpa"], ours["new_times_sdpa"]) == (30 / 8, 33 / 8)


def test_what_cannot_be_compared_is_said(files, tmp_path):
    old, new = files(old=run_of(*pair()), new=run_of(*pair("d640_self_4k")))
    (other,) = files(other=run_of(*pair(), device="NVIDIA H100"))
    assert "timed in both" in invoke("bench", "--compare", old, new, code=2)
    assert "H100" in invoke("bench", "--compare", old, other, code=2)
    assert "gone.json" in invoke("bench", "--compare", tmp_path / "gone.json", new, code=2)
    assert "--threshold" in invoke("bench", "--compare", old, old, "--threshold", "-1", code=2)
    assert "--threshold" in invoke("bench", "--compare", old, old, "--threshold", "nan", code=2)
    assert "one new" in invoke("bench", "--compare", old, old, new, code=2)


def test_a_run_can_be_compared_drawn_and_printed_as_json_at_once(tmp_path):
    common = ("bench", "--cases", "cpu_self", "--providers", "sdpa", "--seconds", "0.01", "--device", "cpu", "--output")
    invoke(*common, tmp_path / "first")
    (old,) = (tmp_path / "first").iterdir()
    more = ("--compare", old, "--threshold", "1e6", "--html", tmp_path / "page.html", "--json")
    done = CliRunner().invoke(app, [str(each) for each in (*common, tmp_path / "second", *more)])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert len(content["rows"]) == len(content["compare"]["rows"]) == 2
    assert "cpu_self" in (tmp_path / "page.html").read_text()


def test_odd_numbers_and_notes_are_shown_and_are_no_json(files):
    pytest.importorskip("matplotlib")
    run = run_of(*pair())
    run.rows[1].relative_error, run.rows[1].note = float("nan"), "failed: [/red] [Errno 2]"
    (path,) = files(odd=run)
    assert "[/red] [Errno 2]" in invoke("bench", path)
    done = CliRunner().invoke(app, ["bench", "--json", str(path)])
    assert json.loads(done.stdout)["rows"][1]["relative_error"] is None
    assert "error" not in plots.draw(results.load(path))


def test_places_and_options_that_do_not_fit_are_named(files, tmp_path):
    (path,) = files(a=run_of(*pair()))
    assert "--plot" in invoke("bench", "--plot", path, path, code=2)
    assert "--html" in invoke("bench", "--html", tmp_path, path, code=2)
    assert "not timed" in invoke("bench", "--cases", "cpu_self", path, code=2)


# --- plots and the page -----------------------------------------------------------------------------------------------


def texts(svg):
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


def test_plots_show_the_numbers_and_the_ceiling():
    pytest.importorskip("matplotlib")
    more = {"peak_gb": 1.25, "relative_error": 2e-3}
    rows = [dataclasses.replace(each, **more) for each in pair()]
    drawn = plots.draw(run_of(*rows, row("d512_self_8k", "fwd", "a <new> one", 10.0, 30.0)))
    assert set(drawn) == {"speedup", "tflops", "memory", "error"}
    assert {"3.75x", "3.00x", "d512_self_8k fwd", "ffpa_hf, Triton", "a &lt;new&gt; one"} <= set(
        texts(drawn["speedup"])
    )
    assert "1.00x" not in texts(drawn["speedup"]), "SDPA is the line"
    assert {"147", "550", "700", "PyTorch SDPA"} <= set(texts(drawn["tflops"]))
    assert "1.25" in texts(drawn["memory"]) and "2.0e-03" in texts(drawn["error"])
    for text in drawn.values():
        assert "#000000" not in text and "fill: #ffffff" not in text, "unreadable on a dark or a light page"
    assert plots.draw(run_of(*rows)) == plots.draw(run_of(*rows)), "the same results give the same bytes"


def test_decoding_and_windows_have_no_bar_of_tflops():
    pytest.importorskip("matplotlib")
    drawn = plots.draw(run_of(*pair("d512_decode_8k"), *pair("d256_window1k_8k")))
    assert set(drawn) == {"speedup"}
    assert plots.draw(run_of()) == {}


def test_committed_plots_are_those_of_the_committed_results():
    pytest.importorskip("matplotlib")
    expected = set()
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        try:
            run = results.load(path)
        except ValueError:  # results of another kind
            continue
        for kind, text in plots.draw(run).items():
            kept = ROOT / "docs" / "plots" / f"{path.stem}-{kind}.svg"
            expected.add(kept)
            command = f"ffpa-hf bench --plot docs/plots benchmarks/results/{path.name}"
            assert kept.exists() and texts(kept.read_text()) == texts(text), command
    assert expected and expected == set((ROOT / "docs" / "plots").iterdir())


def test_plots_without_matplotlib_name_the_extra(files, tmp_path, monkeypatch):
    (path,) = files(a=run_of(*pair()))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "ffpa-hf[demo]" in invoke("bench", "--plot", tmp_path, path, code=2)
    invoke("bench", "--html", tmp_path / "page.html", path)
    assert "matplotlib is not installed" in (tmp_path / "page.html").read_text()


def test_the_page_is_one_file_that_escapes_what_it_shows(files, tmp_path):
    run = run_of(*pair(), command="ffpa-hf bench --name '<b>'")
    run.rows[1].note = "<script>alert(1)</script>"
    a, b = files(a=run, b=run_of(*pair()))
    invoke("bench", "--html", tmp_path / "deep" / "page.html", a, b)
    text = (tmp_path / "deep" / "page.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text and "&lt;b&gt;" in text
    assert not re.search(r"(?:src|href)=[\"'](?!#)", text.replace("xlink:href", "href")), (
        "loads something from elsewhere"
    )
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "ids of the plots clash"
    assert {each for each in re.findall(r'href="#([^"]+)"', text)} <= set(ids)
