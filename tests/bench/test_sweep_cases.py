"""The sweep with made-up times, and a tiny one on the CPU: what is compared, listed and kept."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from ffpa_hf import cli_tuning, settings
from ffpa_hf.bench import cases, results, sweep
from ffpa_hf.bench.results import Row
from ffpa_hf.cli import app
from ffpa_hf.kernels.tuning import clock

CPU = torch.device("cpu")
TINY = {case.mask: case for case in cases.SWEEP_TINY[:5]}
cli = CliRunner()


@pytest.fixture
def clocked(monkeypatch):
    """Times by provider and direction instead of a clock; defaults to 1 ms."""
    times: dict = {}

    class Sampler:
        def __init__(self, run, device):
            run()
            self.estimate = 1.0
            self.device = device

        def sample(self):
            return self.estimate

        def round_ms(self):
            return self.estimate

    def medians(samplers, seconds, **_):
        return [sampler.estimate for sampler in samplers]

    real = sweep._entry

    def entry(case, direction, provider, *more):
        made = real(case, direction, provider, *more)
        made.sampler.estimate = times.get((case.id, provider, direction), times.get((provider, direction), 1.0))
        return made

    monkeypatch.setattr(clock, "Sampler", Sampler)
    monkeypatch.setattr(clock, "medians", medians)
    monkeypatch.setattr(sweep, "_entry", entry)
    return times


def run(chosen, providers=sweep.PROVIDERS_FOR_CHECK, **options):
    record = results.Results("CPU", results.now(), "", {})
    left = sweep.run(chosen, providers, record, CPU, **options)
    return record, left


@pytest.mark.parametrize("case", cases.SWEEP_TINY, ids=lambda case: case.id)
def test_every_kind_of_case_runs_and_all_routes_agree(case, clocked, monkeypatch):
    monkeypatch.setattr(sweep, "_TOLERANCE", 1e-5)
    providers = ("sdpa", "ffpa_hf/sdpa", "ffpa_hf/auto")
    rows = sweep.run_case(case, providers, CPU)
    each = 1.0 / case.kv_sets
    assert all(row.ms == each and row.speedup_vs_sdpa == 1.0 and row.tflops > 0 for row in rows), rows
    expected = providers if case.mask not in ("none", "causal") or case.group > 1 else ("sdpa", "ffpa_hf/auto")
    assert [row.provider for row in rows] == [*expected, *expected]


def test_masks_of_both_routes_are_the_same_mask():
    for case in TINY.values():
        tensors = sweep._mask_tensors(case, CPU)
        intervals = sweep._intervals(case, CPU)
        if intervals is not None:
            keep = tensors["bool mask"]
            assert torch.equal(intervals.dense(case.kv_len).expand(keep.shape), keep)
            assert torch.equal(tensors["additive mask"] == 0, keep)
            assert not keep.all() and keep.any()


def test_decoding_reads_several_key_sets_and_padding_sees_its_last_keys():
    case = cases.sweep_case(64, 4, 1, 64, "padded", group=2, dtype="float32")
    assert case.kv_sets == 4
    assert int(sweep._intervals(case, CPU).dense(64).sum()) == 56  # all but every eighth
    rows = sweep.run_case(case, sweep.PROVIDERS_FOR_CHECK, CPU, seconds=0.001)
    assert all(row.ms > 0 for row in rows)


def test_a_route_with_other_results_gets_no_time(clocked, monkeypatch):
    real = sweep.variants

    def variants(case, device, provider):
        (note, call), *_ = real(case, device, provider)
        factor = 1.5 if provider == "ffpa_hf/auto" else 1.0
        return [(note, lambda q, k, v: call(q, k, v) * factor)]

    monkeypatch.setattr(sweep, "variants", variants)
    record, _ = run([TINY["none"]])
    auto = [row for row in record.rows if row.provider == "ffpa_hf/auto"]
    assert all(row.ms is None and "differs from sdpa by 5" in row.note for row in auto)
    assert sweep.losers(record.rows) == auto


def test_a_route_that_fails_is_a_note_and_a_loser(clocked, monkeypatch):
    real = sweep._our_variant

    def broken(case, device, backend):
        def call(query, key, value):
            raise RuntimeError("out of resources\nmore")

        return "auto", call

    monkeypatch.setattr(sweep, "_our_variant", broken)
    record, _ = run([TINY["none"]])
    assert [row.note for row in sweep.losers(record.rows)] == ["failed: RuntimeError: out of resources"] * 2
    monkeypatch.setattr(sweep, "_our_variant", real)
    monkeypatch.setattr(sweep, "make_data", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
    record, _ = run([TINY["none"]])
    assert all("no room" in row.note for row in record.rows) and sweep.losers(record.rows) == []


def test_slower_by_more_than_the_noise_is_a_loser_in_either_direction(clocked):
    clocked["ffpa_hf/auto", "fwd"] = 1.02
    clocked["ffpa_hf/auto", "fwd+bwd"] = 1.04
    record, _ = run([TINY["none"]])
    assert [(row.direction, round(row.speedup_vs_sdpa, 3)) for row in sweep.losers(record.rows)] == [("fwd+bwd", 0.962)]


def test_a_loser_is_timed_once_more_and_the_longer_look_counts(monkeypatch):
    looks = []

    def run_case(case, providers, device, *, seconds):
        looks.append(seconds)
        slow = 2.0 if len(looks) == 1 else 1.0
        return [
            Row(case.id, "fwd", "sdpa", ms=1.0, speedup_vs_sdpa=1.0),
            Row(case.id, "fwd", "ffpa_hf/auto", ms=slow, speedup_vs_sdpa=1 / slow),
        ]

    monkeypatch.setattr(sweep, "run_case", run_case)
    record, _ = run([TINY["none"]], seconds=0.1)
    assert looks == [0.1, 0.4] and sweep.losers(record.rows) == []


def test_no_case_begins_after_the_time_is_up():
    record, left = run(list(TINY.values()), minutes=0.0)
    assert left == list(TINY.values()) and record.rows == []


def test_grouped_keys_are_expanded_or_grouped_and_never_grouped_above_256():
    def notes(head_dim):
        case = cases.sweep_case(head_dim, 4, 16, 16, "none", group=2)
        return [note for note, _ in sweep.variants(case, CPU, "sdpa")]

    assert notes(256) == ["expanded K/V", "enable_gqa"] and notes(264) == ["expanded K/V"]


def test_short_calls_are_timed_in_graphs_all_alike(clocked, monkeypatch):
    replayed = []

    def captured(run):
        def replay():
            replayed.append(1)
            run()

        return replay

    class Gpu:
        type = "cuda"

    monkeypatch.setattr(sweep, "_captured", captured)
    data = [sweep._Entry(Row("c", "fwd", name), lambda: None, clock.Sampler(lambda: None, CPU), 2) for name in "ab"]
    data[0].sampler.estimate, data[1].sampler.estimate = 0.08, 3.0  # two calls of 0.04 ms
    sweep._sample(data, Gpu(), 0.1)
    assert len(replayed) == 4 and all(sweep.is_launch_bound(entry.row) for entry in data)
    assert data[0].row.ms == 1.0 / (2 * sweep._GRAPH_CALLS)
    data = [sweep._Entry(Row("c", "fwd", "a"), lambda: None, clock.Sampler(lambda: None, CPU), 1)]
    sweep._sample(data, Gpu(), 0.1)
    assert len(replayed) == 4 and not sweep.is_launch_bound(data[0].row)


def test_workers_share_the_cases_by_what_has_to_be_compiled(monkeypatch):
    ran = []
    monkeypatch.setattr(sweep, "make_data", lambda case, device: ran.append(case.id))
    counts = [sweep.warm(cases.SWEEP, "ffpa_hf/auto", "cpu", index, 5) for index in range(5)]
    assert sorted(ran) == sorted(case.id for case in cases.SWEEP) and counts.count(0) == 5  # no data: none ran
    ran.clear()
    sweep.warm([c for c in cases.SWEEP if c.head_dim == 64 and c.mask == "causal"], "ffpa_hf/auto", "cpu", 1, 2)
    assert ran == [], "one kind is one worker's"


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_check_lists_every_loser_and_says_so_in_its_exit_code(clocked, tmp_path):
    case = TINY["bool"].id
    clocked[case, "ffpa_hf/auto", "fwd"] = 2.0
    arguments = ["bench", "--check-auto", "--device", "cpu", "--output", str(tmp_path)]
    done = cli.invoke(app, arguments)
    assert done.exit_code == 1, done.output
    assert "auto slower than F.sdpa by more than 3%: 1" in done.output
    assert f"{case} fwd: 0.500 of SDPA's speed; sdpa / sdpa" in done.output
    assert "13 of 14 timings are not slower" in done.output
    clocked.clear()
    done = cli.invoke(app, arguments)
    assert done.exit_code == 0 and "14 of 14 timings" in done.output
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    assert path.name.endswith("-cpu-auto-check.json")
    assert {row["provider"] for row in content["rows"]} == {"sdpa", "ffpa_hf/auto"}
    assert results.load(path).rows


def test_the_sweep_writes_what_a_table_is_built_from(clocked, tmp_path, no_interpreter):
    done = cli.invoke(app, ["bench", "--cases", "sweep_tiny", "--device", "cpu", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-cpu-sweep.json")
    providers = {row["provider"] for row in json.loads(path.read_text())["rows"]}
    assert providers == {"sdpa", "ffpa_hf/sdpa"}, "no kernel serves a CPU"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--check-auto", "--cases", "cpu_self"), "--cases"),
        (("--cases", "sweep_tiny", "--providers", "sdpa,fa4"), "fa4"),
        (("--cases", "sweep_tiny", "--providers", "ffpa_hf/auto"), "--providers"),
    ],
)
def test_the_sweep_names_the_wrong_argument(arguments, named):
    done = cli.invoke(app, ["bench", "--device", "cpu", *arguments])
    assert done.exit_code == 2 and named in done.output


def test_workers_are_processes_of_their_own_and_their_failures_are_no_ones(capfd):
    cli_tuning._in_workers(_work, (10,), 3, "adding")
    assert "adding: 30 runs" in capfd.readouterr().err
    cli_tuning._in_workers(_work, (10,), 1, "adding")
    assert capfd.readouterr().err == ""


def _work(number: int, index: int, count: int) -> int:
    if index == 1:
        raise RuntimeError("this one fails")
    return number + 5


def test_settings_are_back_after_a_forced_kernel(clocked):
    before = settings.current()
    sweep.run_case(TINY["none"], ("sdpa", "ffpa_hf/triton"), CPU)
    assert settings.current() == before
