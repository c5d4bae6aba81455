"""A run of the benchmark on a CPU: schema, errors, failures, and the float64 result it judges by."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from ffpa_hf.bench import cases, providers, results, runner, truth
from ffpa_hf.bench.providers import Provider, Unavailable, Variant

CPU = torch.device("cpu")
SMOKE = {case.id: case for case in cases.CPU_SMOKE}
ROW_FIELDS = {
    "case", "direction", "provider", "ms", "tflops", "relative_error", "speedup_vs_sdpa", "peak_gb", "tokens_per_s",
    "attention_ms", "note",
}  # fmt: skip


def measure(case, *timed, directions=None, **options):
    return runner.run_case(case, directions or case.directions, timed, CPU, seconds=0.001, **options)


def sdpa_provider(name="sdpa", scale=1.0):
    def call(query, key, value):
        return F.scaled_dot_product_attention(query, key, value) * scale

    return Provider(name, lambda case, device: [Variant("", lambda: call)])


def test_a_run_writes_the_published_schema(tmp_path):
    record = results.Results("CPU", results.now(), "ffpa-hf bench", results.versions())
    kept = []
    timed = providers.select(["sdpa", "ffpa_hf/auto"], CPU)
    left = runner.run(cases.CPU_SMOKE, None, timed, record, CPU, seconds=0.001, on_case=lambda: kept.append(1))
    path = tmp_path / "more" / results.file_name(record, "smoke")
    record.write(path)
    content = json.loads(path.read_text())
    assert left == [] and len(kept) == len(cases.CPU_SMOKE)
    assert set(content) == {"device", "date", "command", "versions", "matmul_tflops", "copy_tb_s", "rows"}
    assert content["matmul_tflops"] > 0 and content["copy_tb_s"] > 0 and content["versions"]["torch"]
    expected = [(c.id, d, p.name) for c in cases.CPU_SMOKE for d in c.directions for p in timed]
    assert [(row["case"], row["direction"], row["provider"]) for row in content["rows"]] == expected
    for row in content["rows"]:
        assert set(row) == ROW_FIELDS
        assert row["ms"] > 0 and row["tflops"] > 0 and row["speedup_vs_sdpa"] > 0, row
        assert row["relative_error"] < 1e-5, row
    assert results.load(path).rows == record.rows


def test_our_rows_name_the_backends_that_ran():
    (row,) = measure(SMOKE["cpu_window"], *providers.select(["ffpa_hf/auto"], CPU))
    assert row.note == "sdpa / sdpa" and row.speedup_vs_sdpa is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU machine the interpreter is off")
def test_a_named_kernel_is_timed_at_any_length():
    case = cases.Case("tiny", 1, 16, 16, 64, dtype="float32", directions=("fwd+bwd",))
    (row,) = measure(case, *providers.select(["ffpa_hf/triton"], CPU))
    assert row.note == "triton / triton" and row.ms > 0 and row.relative_error < 1e-5


def test_speedup_is_against_the_sdpa_row_of_the_same_direction():
    rows = measure(SMOKE["cpu_self"], sdpa_provider(), sdpa_provider("other"))
    for first, second in (rows[:2], rows[2:]):
        assert first.provider == "sdpa" and first.speedup_vs_sdpa == 1.0
        assert second.speedup_vs_sdpa == pytest.approx(first.ms / second.ms)


def test_wrong_results_show_as_error():
    rows = measure(SMOKE["cpu_self"], sdpa_provider(), sdpa_provider("wrong", scale=1.5), directions=("fwd", "bwd"))
    errors = {(row.provider, row.direction): row.relative_error for row in rows}
    assert errors["wrong", "fwd"] == pytest.approx(0.5, rel=1e-3)
    assert errors["wrong", "bwd"] == pytest.approx(0.5, rel=1e-3)
    assert errors["sdpa", "fwd"] < 1e-6


def _failing(name, error):
    def variants(case, device):
        raise error

    return Provider(name, variants)


def test_a_failing_provider_is_a_row_with_a_note_and_the_others_go_on():
    late = {"calls": 0}

    def call(query, key, value):
        late["calls"] += 1
        if late["calls"] > 7:
            raise RuntimeError("device lost\ndetails")
        return F.scaled_dot_product_attention(query, key, value)

    rows = measure(
        SMOKE["cpu_self"],
        _failing("missing", Unavailable("not installed")),
        _failing("broken", KeyError("x")),
        _failing("big", torch.OutOfMemoryError("tried to allocate")),
        Provider("late", lambda case, device: [Variant("", lambda: call)]),
        sdpa_provider(),
        directions=("fwd",),
    )
    notes = {row.provider: row.note for row in rows}
    assert notes == {
        "missing": "not installed",
        "broken": "failed: KeyError: 'x'",
        "big": "out of memory",
        "late": "failed: RuntimeError: device lost",
        "sdpa": "",
    }
    assert [row.ms is None for row in rows] == [True, True, True, True, False]


def test_a_case_that_does_not_fit_is_noted_and_the_run_goes_on(monkeypatch):
    real = truth.compute

    def compute(case, *tensors):
        if case.id == "cpu_self":
            raise torch.OutOfMemoryError("no room")
        return real(case, *tensors)

    monkeypatch.setattr(truth, "compute", compute)
    record = results.Results("CPU", results.now(), "", {})
    chosen = (SMOKE["cpu_self"], SMOKE["cpu_window"])
    runner.run(chosen, ("fwd",), providers.select(["sdpa"], CPU), record, CPU, seconds=0.001)
    assert "no room" in record.rows[0].note and record.rows[0].ms is None
    assert record.rows[1].ms > 0


def test_no_case_begins_after_the_time_is_up():
    record = results.Results("CPU", results.now(), "", {})
    left = runner.run(cases.CPU_SMOKE, None, providers.select(["sdpa"], CPU), record, CPU, minutes=0.0)
    assert left == list(cases.CPU_SMOKE) and record.rows == []


def test_the_fastest_variant_is_the_row_and_a_failing_one_is_passed_over():
    import time

    def slow(query, key, value):
        time.sleep(0.02)
        return F.scaled_dot_product_attention(query, key, value)

    def broken():
        raise RuntimeError("No available kernel")

    variants = [
        Variant("broken", broken),
        Variant("slow", lambda: slow),
        Variant("fast", lambda: F.scaled_dot_product_attention),
    ]
    (row,) = measure(SMOKE["cpu_self"], Provider("p", lambda case, device: variants), directions=("fwd",))
    assert row.note == "fast" and row.ms < 20


@pytest.mark.parametrize(("name", "backward"), [("sdpa", {"fast", "near"}), ("peer", {"fast", "near", "far"})])
def test_a_way_through_sdpa_that_is_far_slower_forward_is_not_tried_backward(monkeypatch, name, backward):
    ways = {"fast": 0.01, "near": 0.02, "far": 0.2}
    tried: list[tuple[str, str]] = []
    real = runner._step

    def step(case, direction, call, data):
        tried.append((direction, call.__name__))
        return real(case, direction, call, data)

    def variant(way, pause):
        def call(query, key, value):
            import time

            time.sleep(pause)
            return F.scaled_dot_product_attention(query, key, value)

        call.__name__ = way
        return Variant(way, lambda: call)

    monkeypatch.setattr(runner, "_step", step)
    provider = Provider(name, lambda case, device: [variant(*each) for each in ways.items()])
    rows = measure(SMOKE["cpu_self"], provider, directions=("fwd", "bwd"))
    assert {way for direction, way in tried if direction == "fwd"} == set(ways)
    assert {way for direction, way in tried if direction == "bwd"} == backward
    assert all(row.ms is not None for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU machine the interpreter is off")
def test_workers_share_the_cases_among_the_providers_that_compile(monkeypatch):
    seen = []
    real = runner._step

    def step(case, direction, call, data):
        seen.append((case.id, direction))
        return real(case, direction, call, data)

    monkeypatch.setattr(runner, "_step", step)
    chosen = (SMOKE["cpu_self"], SMOKE["cpu_window"], *cases.OVERHEAD)
    counts = [runner.warm(chosen, None, ["sdpa", "ffpa_hf/auto", "fa4"], "cpu", index, 3) for index in range(3)]
    assert counts == [1, 1, 0]
    assert seen == [("cpu_self", "fwd"), ("cpu_self", "bwd"), ("cpu_window", "fwd")]
    assert runner.warm(chosen, None, ["sdpa"], "cpu", 0, 1) == 0
    assert runner.warm(chosen, None, ["flex"], "cpu", 0, 1) == 0, "what cannot run here is passed over"


def test_a_provider_without_backward_says_so():
    forward_only = Provider("p", lambda case, device: [], directions=("fwd",))
    (row,) = measure(SMOKE["cpu_self"], forward_only, directions=("bwd",))
    assert row.note == "has no backward" and row.ms is None


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_a_layout_is_a_memory_order_of_the_same_values(layout):
    data = runner.make_data(SMOKE["cpu_gqa_causal"], CPU)
    stored = runner._in_layout(data, layout)
    order = stored.query if layout == "BHND" else stored.query.transpose(1, 2)
    assert order.is_contiguous() and torch.equal(stored.query, data.query)
    assert stored.query.is_leaf and stored.query.requires_grad and stored.pairs[0][0].requires_grad


def test_inputs_are_the_same_on_every_run_and_differ_between_cases():
    first, again = (runner.make_data(SMOKE["cpu_self"], CPU) for _ in range(2))
    assert torch.equal(first.query, again.query)
    assert not torch.equal(first.query[..., :40, :], runner.make_data(SMOKE["cpu_gqa_causal"], CPU).query[:, :2])


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_is_timed_with_memory_and_both_directions():
    gpu = torch.device("cuda", torch.cuda.current_device())
    case = cases.Case("gpu", 4, 1024, 1024, 128, kv_heads=2, causal=True, directions=("fwd", "bwd", "fwd+bwd"))
    timed = providers.select(["sdpa", "ffpa_hf/auto", "ffpa_hf/triton"], gpu)
    rows = runner.run_case(case, case.directions, timed, gpu, seconds=0.05)
    by_key = {(row.provider, row.direction): row for row in rows}
    for row in rows:
        assert row.ms and row.tflops and row.relative_error < 2e-2 and row.peak_gb > 0, row
    assert by_key["ffpa_hf/triton", "fwd"].note == "triton / triton"


@pytest.mark.gpu
def test_decoding_is_replayed_from_a_graph_over_all_sets():
    gpu = torch.device("cuda", torch.cuda.current_device())
    case = cases.Case("gpu_decode", 8, 1, 2048, 128, kv_heads=2, kv_sets=3, graph=True)
    (row,) = runner.run_case(case, ("fwd",), providers.select(["ffpa_hf/triton"], gpu), gpu, seconds=0.05)
    assert row.ms and row.ms < 5 and row.relative_error < 2e-2, row


@pytest.mark.gpu
def test_time_spent_by_the_host_does_not_count():
    import time

    gpu = torch.device("cuda", torch.cuda.current_device())
    data = torch.zeros(1024, device=gpu)

    class Step:
        calls = 1

        def prepare(self, count):
            return None

        def run(self, state, count):
            for _ in range(count):
                time.sleep(0.002)
                data.add_(1.0)

    step = Step()
    runner.milliseconds(step, 2, gpu)
    assert runner.milliseconds(step, 2, gpu, host_ms=2.5) < 0.5


@pytest.mark.gpu
def test_the_ceilings_of_a_gpu_are_plausible():
    gpu = torch.device("cuda", torch.cuda.current_device())
    assert 1 < runner.matmul_tflops(gpu) < 5000 and 0.05 < runner.copy_tb_s(gpu) < 20


# --- the float64 result -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases.CPU_SMOKE, ids=lambda case: case.id)
def test_truth_in_chunks_is_eager_attention(case, monkeypatch):
    monkeypatch.setattr(truth, "_CHUNK_ELEMENTS", 7 * case.group * case.kv_len)  # seven rows at a time
    data = runner.make_data(case, CPU)
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in data.leaves)
    row, key = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)
    keep = key <= row if case.causal else torch.ones(case.q_len, case.kv_len, dtype=torch.bool)
    if case.window is not None:
        keep = keep & (key > row - case.window)
    if case.documents:
        length = case.q_len // case.documents
        keep = keep & (key // length == row // length)
    out = F.scaled_dot_product_attention(
        q, k.repeat_interleave(case.group, 1), v.repeat_interleave(case.group, 1), attn_mask=keep
    )
    grads = torch.autograd.grad(out, (q, k, v), data.grad_out.double())
    exact = truth.compute(case, *(t.detach() for t in data.leaves), data.grad_out)
    assert exact.forward_error(out.detach()) < 1e-13
    assert exact.backward_error(grads) < 1e-13
    for index in range(3):
        spoiled = list(grads)
        spoiled[index] = spoiled[index] * 1.01
        assert exact.backward_error(tuple(spoiled)) == pytest.approx(0.01)


def test_a_row_says_when_its_error_is_of_some_heads():
    case = cases.Case("five", 5, 8, 8, 64, dtype="float32")
    (row,) = measure(case, sdpa_provider(), directions=("fwd",))
    assert row.note == "error on 2 of 5 heads"


def test_truth_sees_the_last_head_of_the_last_batch():
    case = cases.Case("two", 4, 8, 8, 64, kv_heads=2, batch=2, dtype="float32")
    data = runner.make_data(case, CPU)
    exact = truth.compute(case, *(t.detach() for t in data.leaves), None)
    assert exact.slices == ((0, 0, 0), (1, 2, 1))
    out = F.scaled_dot_product_attention(*data.leaves, enable_gqa=True).detach()
    assert exact.forward_error(out) < 1e-6
    out[1, 3, 7] += 1.0
    assert exact.forward_error(out) > 1e-2


# --- providers --------------------------------------------------------------------------------------------------------


def test_sdpa_tries_every_legal_way_and_all_agree():
    case = SMOKE["cpu_window"]
    data = runner.make_data(case, CPU)
    exact = truth.compute(case, *(t.detach() for t in data.leaves), None)
    variants = providers._sdpa(case, CPU)
    assert {v.note for v in variants} == {
        f"torch's choice, {mask}, {group}"
        for mask in ("bool mask", "additive mask")
        for group in ("expanded K/V", "enable_gqa")
    }
    for variant in variants:
        assert exact.forward_error(variant.prepare()(*data.leaves).detach()) < 1e-6, variant.note


def test_missing_peers_are_notes_and_are_left_out_unless_named():
    names = [provider.name for provider in providers.select(None, CPU)]
    assert names == ["sdpa", "ffpa_hf/auto", "ffpa_hf/triton"]
    chosen = providers.select(["fa4", "sdpa"], CPU)
    assert [provider.name for provider in chosen] == ["sdpa", "fa4"]
    with pytest.raises(ValueError, match="'fa5'"):
        providers.select(["fa5"], CPU)


def _peer(monkeypatch, name, **members):
    import sys
    from types import ModuleType

    module = ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("provider", "module"), [("fa4", "flash_attn.cute"), ("fa3", "fa3_fwd_interface")])
def test_flash_attention_is_called_in_its_own_layout(monkeypatch, provider, module):
    seen = {}

    def flash_attn_func(q, k, v, causal, window_size):
        seen.update(shape=tuple(q.shape), contiguous=q.is_contiguous(), causal=causal, window=window_size)
        keep = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
        keep &= keep.new_ones(keep.shape).triu(-window_size[0])
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=keep, enable_gqa=True)
        return out.transpose(1, 2), None

    _peer(monkeypatch, module.split(".")[0])
    _peer(monkeypatch, module, flash_attn_func=flash_attn_func)
    case = SMOKE["cpu_window"]
    (row,) = measure(case, *providers.select([provider], CPU))
    assert row.relative_error < 1e-6, row.note
    assert seen == {"shape": (1, 56, 2, 72), "contiguous": True, "causal": True, "window": (15, 0)}


def test_a_broken_peer_is_a_note(monkeypatch):
    import importlib

    def import_module(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr(importlib, "import_module", import_module)
    (row,) = measure(SMOKE["cpu_self"], *providers.select(["fa4"], CPU), directions=("fwd",))
    assert "flash-attn-4 cannot be imported" in row.note and "undefined symbol" in row.note


def test_ffpa_attn_is_not_timed_where_it_would_run_sdpa(monkeypatch):
    class Config:
        def __init__(self, **options):
            pass

    _peer(monkeypatch, "ffpa_attn", TritonBackend=Config, CuTeDSLBackend=Config, ffpa_attn_func=None)
    small, short = cases.Case("small", 1, 600, 600, 256), cases.Case("short", 1, 400, 600, 512)
    for build, case in (
        (providers._ffpa_attn_triton, small), (providers._ffpa_attn_cute, small), (providers._ffpa_attn_triton, short)
    ):  # fmt: skip
        with pytest.raises(Unavailable, match="F.sdpa"):
            build(case, CPU)
    assert providers._ffpa_attn_triton(cases.Case("wide", 1, 600, 600, 512), CPU)
