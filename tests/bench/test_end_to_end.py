"""The end-to-end benchmark on a CPU: what it writes, what it judges, and that full-size models fit together."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from ffpa_hf import cli
from ffpa_hf.bench import end_to_end, jobs, models, profile, results

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

CPU = torch.device("cpu")
TINY = {case.id: case for case in end_to_end.TINY}
FULL = {case.id: case for case in end_to_end.FULL}
pytestmark = pytest.mark.usefixtures("no_interpreter")


def measure(case_id, providers=end_to_end.DEFAULT_PROVIDERS):
    case = TINY[case_id]
    return end_to_end.run_case(case, models.MODELS[case.model].make(CPU), providers, CPU, seconds=0.01)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Everything that one run of the command writes, over all tiny cases."""
    folder = tmp_path_factory.mktemp("e2e")
    done = CliRunner().invoke(
        cli.app, ["bench", "--e2e", "--device", "cpu", "--output", str(folder), "--seconds", "0.01"]
    )
    files = {path.name.split("-cpu-")[1]: json.loads(path.read_text()) for path in folder.iterdir()}
    return done, files


def test_a_run_writes_the_published_schema(written):
    done, files = written
    assert done.exit_code == 0, done.output
    assert set(files) == {"e2e.json", "e2e-profile.json"}
    rows = [results.Row(**row) for row in files["e2e.json"]["rows"]]
    ways = {"generate_tiny": ("prefill", "decode"), "vae_tiny": ("fwd",), "flux_tiny": ("fwd",), "wan_tiny": ("fwd",)}
    assert [(row.case, row.direction, row.provider) for row in rows] == [
        (case, way, provider)
        for case in TINY
        for way in ways.get(case, ("step",))
        for provider in end_to_end.DEFAULT_PROVIDERS
    ]
    for row in rows:
        assert row.attention_ms is not None and 0 < row.relative_error < 1e-5, row
        assert row.direction == "decode" or (row.ms > 0 and 0 < row.attention_ms), row  # a difference of two times
        assert (row.tokens_per_s is None) == row.case.startswith("vae")
        assert row.provider != "sdpa" or (row.speedup_vs_sdpa == 1.0 and row.note == "")


def test_every_attention_call_of_our_rows_was_ours(written):
    _, files = written
    notes = {
        (row["case"], row["direction"]): row["note"] for row in files["e2e.json"]["rows"] if "/" in row["provider"]
    }
    calls = {"gemma4_tiny": 2, "gemma4_tiny_packed": 2, "gemma4_tiny_packed_cu": 2, "vae_tiny": 1, "flux_tiny": 3}
    for case, count in {**calls, "wan_tiny": 4, "generate_tiny": 10}.items():  # 2 layers, a prompt and 4 tokens
        assert {note for (name, _), note in notes.items() if name == case} == {f"calls: {count} sdpa"}


def test_profiles_name_what_took_longest(written):
    _, files = written
    longest = files["e2e-profile.json"]["longest"]
    assert set(longest) == set(TINY) and set(longest["generate_tiny"]) == {
        f"{provider} {way}" for provider in end_to_end.DEFAULT_PROVIDERS for way in ("prefill", "decode")
    }
    step = longest["gemma4_tiny"]["sdpa step"]
    assert step == sorted(step, key=lambda kernel: -kernel["ms"]) and {"aten::mm"} <= {k["name"] for k in step}


@pytest.mark.parametrize("case_id", ["gemma4_tiny_packed", "generate_tiny", "vae_tiny", "flux_tiny", "wan_tiny"])
def test_a_slightly_wrong_attention_is_found(case_id, monkeypatch):
    import ffpa_hf.patches.attention_interface as interface
    import ffpa_hf.processors.redirect as redirect

    for module in (interface, redirect):
        right = module.attend

        def sharper(query, *given, right=right, **more):
            return right(query * 1.01, *given, **more)

        monkeypatch.setattr(module, "attend", sharper)
    rows, _ = measure(case_id)
    ours = [row for row in rows if row.provider != "sdpa"]
    assert end_to_end.wrong(rows) == ours and all(row.ms is not None for row in rows)
    assert all(row.relative_error > 1e-4 for row in ours)


def test_documents_that_see_each_other_are_found(monkeypatch):
    from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
    from transformers.modeling_utils import AttentionInterface

    from ffpa_hf.patches.attention_interface import ffpa_attention_forward, ffpa_mask

    def leaking(*given, mask_function, **more):
        return ffpa_mask(*given, mask_function=causal_mask_function, **more)

    assert AttentionInterface._global_mapping["ffpa"] is ffpa_attention_forward
    monkeypatch.setattr("ffpa_hf.patches.transformers.ffpa_mask", leaking)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "ffpa", leaking)
    rows, _ = measure("gemma4_tiny_packed")
    assert [row.provider for row in end_to_end.wrong(rows)] == ["ffpa_hf/auto"]


def test_a_provider_that_fails_is_noted_and_the_others_go_on(monkeypatch):
    import ffpa_hf.patches.attention_interface as interface

    def failing(*given, **more):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(interface, "attend", failing)
    rows, kernels = measure("generate_tiny")
    assert [row.note for row in rows if row.provider != "sdpa"] == ["failed: RuntimeError: no such kernel"] * 2
    assert [row.ms is None for row in rows] == [False, True, False, True]
    assert set(kernels) == {"sdpa prefill", "sdpa decode"}


def test_without_memory_for_the_exact_result_a_case_is_timed_and_says_so(monkeypatch):
    real = jobs.Forward.result

    def result(self, exact=False):
        if exact:
            raise torch.OutOfMemoryError("tried to allocate")
        return real(self)

    monkeypatch.setattr(jobs.Forward, "result", result)
    rows, _ = measure("flux_tiny")
    assert all(row.ms > 0 and row.relative_error is None for row in rows) and not end_to_end.wrong(rows)
    assert [row.note for row in rows] == [
        "not judged, the exact result does not fit",
        "not judged, the exact result does not fit; calls: 3 sdpa",
    ]


def test_without_a_profiler_the_times_stand(monkeypatch):
    def record(function, device):
        raise RuntimeError("no profiler")

    monkeypatch.setattr(profile, "record", record)
    rows, kernels = measure("wan_tiny")
    assert kernels == {} and all(row.ms > 0 and row.attention_ms is None for row in rows)
    assert [row.note for row in rows] == [
        "no profile: RuntimeError: no profiler",
        "calls: 4 sdpa; no profile: RuntimeError: no profiler",
    ]


def test_a_model_that_cannot_be_built_is_noted_and_the_run_goes_on(monkeypatch):
    def build():
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setitem(models.MODELS, "flux_tiny", models.Model("flux_tiny", "", torch.float32, build))
    record = results.Results("CPU", results.now(), "", {})
    chosen = end_to_end.select(["flux_tiny", "wan_tiny"])
    left, _ = end_to_end.run(chosen, ("ffpa_hf/auto",), record, CPU, seconds=0.01)
    assert left == [] and record.rows[0].note.startswith("not run: OutOfMemoryError")
    assert record.rows[1].ms > 0 and record.rows[1].speedup_vs_sdpa is None


def test_no_case_begins_after_the_time_is_up():
    record = results.Results("CPU", results.now(), "", {})
    left, profiles = end_to_end.run(end_to_end.TINY, ("sdpa",), record, CPU, minutes=0)
    assert left == list(end_to_end.TINY) and record.rows == [] and profiles == {}


def test_a_wrong_result_ends_the_command_with_one(tmp_path, monkeypatch):
    monkeypatch.setattr(end_to_end, "TIMES_SDPA_ERROR", 0.0)
    monkeypatch.setattr(end_to_end, "ERROR_FLOOR", {torch.float32: 0.0})
    command = ["bench", "--e2e", "--device", "cpu", "--output", str(tmp_path), "--cases", "flux_tiny", "--seconds", "0"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 1 and "WRONG" in done.output


@pytest.mark.parametrize(
    "wrong", [["--cases", "d512_self_8k"], ["--providers", "fa4"], ["--directions", "fwd"]], ids=lambda w: w[0]
)
def test_impossible_requests_are_refused(wrong, tmp_path):
    done = CliRunner().invoke(cli.app, ["bench", "--e2e", "--device", "cpu", "--output", str(tmp_path), *wrong])
    assert done.exit_code == 2 and not list(tmp_path.iterdir())


def test_cases_are_listed_and_picked_by_set_id_and_glob():
    listed = CliRunner().invoke(cli.app, ["bench", "--e2e", "--list"]).output
    assert all(case_id in listed for case_id in (*FULL, *TINY))
    assert [case.id for case in end_to_end.select(["vae_*", "gemma4_tiny"])] == [
        "vae_128", "vae_256", "gemma4_tiny", "vae_tiny",
    ]  # fmt: skip
    assert end_to_end.select(["e2e_tiny"]) == end_to_end.TINY
    assert end_to_end.select_providers(["ffpa_hf/triton", "sdpa"]) == ("sdpa", "ffpa_hf/triton")


def test_published_cases_are_all_there():
    assert set(FULL) == {
        "gemma4_31b_6l_8k", "gemma4_31b_6l_16k", "gemma4_31b_6l_packed", "gemma4_31b_6l_packed_cu", "generate_8k",
        "vae_128", "vae_256", "flux_1024", "flux_2048", "wan_32k",
    }  # fmt: skip
    names = [case.model for case in (*FULL.values(), *TINY.values())]
    assert len(set(names)) == sum(a != b for a, b in zip(names, [None, *names], strict=False))  # each is built once


@pytest.mark.parametrize(("name", "billions"), [("gemma4_31b_6l", 3.05), ("vae", 0.084), ("flux", 11.9), ("wan", 14.3)])
def test_full_models_have_the_parameters_of_the_real_ones(name, billions):
    model = models.MODELS[name].make(torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(billions * 1e9, rel=0.02)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("case_id", ["gemma4_31b_6l_8k", "vae_128", "flux_1024", "wan_32k"])
def test_full_jobs_fit_their_models(case_id, monkeypatch):
    """Every shape of the real thing, with no data; without data nobody can look whether position_ids restart."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    meta = torch.device("meta")
    case = FULL[case_id]
    job = case.job(models.MODELS[case.model].make(meta), meta)
    tokens = {"gemma4_31b_6l_8k": 8192, "vae_128": None, "flux_1024": 4608, "wan_32k": 32760}
    for way in job.directions:
        assert job.tokens(way) == tokens[case_id]
        job.run(way)


def test_gemma_has_the_layers_of_the_31b_model():
    model = models.MODELS["gemma4_31b_6l"].make(torch.device("meta"))
    kinds = [(layer.self_attn.is_sliding, layer.self_attn.head_dim) for layer in model.model.layers]
    assert kinds == [(True, 256)] * 5 + [(False, 512)]
    widths = [(a.q_proj.out_features, a.k_proj.out_features) for a in (x.self_attn for x in model.model.layers)]
    assert widths == [(32 * 256, 16 * 256)] * 5 + [(32 * 512, 4 * 512)]
    assert model.config.sliding_window == 1024


def test_parameters_come_back_as_they_were():
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    before = model.weight.detach().clone()
    with jobs.parameters_in(model, torch.float32):
        assert model.weight.dtype == torch.float32
        model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.weight, before) and model.weight.grad is None


def test_distance_is_relative_over_all_and_nan_is_far():
    truth = [torch.tensor([3.0]), torch.tensor([[4.0]], dtype=torch.float64)]
    assert jobs.distance([torch.tensor([3.0]), torch.tensor([[4.5]])], truth) == pytest.approx(0.1)
    assert jobs.distance([torch.tensor([float("nan")]), truth[1]], truth) == float("inf")


def test_generations_are_compared_up_to_where_the_text_parts():
    job = jobs.Generate.__new__(jobs.Generate)
    tokens, logits = torch.tensor([5, 6, 7]), torch.eye(3)
    other = logits.clone()
    other[2] = 9.0  # after another second token: no longer the same text
    assert job.errors((torch.tensor([5, 9, 7]), other), (tokens, logits)) == {"logits": 0.0}
    assert job.errors((tokens, other), (tokens, logits))["logits"] > 1
    other[0] = 9.0
    assert job.errors((torch.tensor([9, 9, 7]), other), (tokens, logits))["logits"] > 1


def test_attention_time_is_counted_once_and_whole():
    query = torch.randn(1, 4, 256, 64, requires_grad=True)
    other = torch.randn(64, 64)

    def work():
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        (out @ other).sum().backward()

    seen = profile.record(work, CPU)
    times = {kernel.name: kernel.ms for kernel in seen.kernels}
    inside = [ms for name, ms in times.items() if "scaled_dot_product" in name]
    assert len(inside) >= 2 and sum(inside) <= seen.attention_ms < sum(times.values())
    assert profile.record(lambda: other @ other, CPU).attention_ms == 0
