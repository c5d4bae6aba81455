"""Auto's measured preferences: built from a sweep, read by thresholds, decided by the slower neighbour, traceable."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from ffpa_hf import settings
from ffpa_hf.bench import cases
from ffpa_hf.call import AttentionCall
from ffpa_hf.kernels import qualification
from ffpa_hf.kernels.tuning import generation, preferences
from ffpa_hf.kernels.tuning.preferences import Band, Lanes, Step, lookup

GPU = "NVIDIA H200"


def row(mask, head_dim, lanes, q_len, kv_len=None, *, grouped=False, **speedups):
    return {
        "mask": mask, "grouped": grouped, "head_dim": head_dim, "lanes": lanes, "q_len": q_len,
        "kv_len": kv_len or q_len, "speedups": speedups,
    }  # fmt: skip


ROWS = [
    row("causal", 256, 16, 512, triton=[0.8, 0.9]),
    row("causal", 256, 16, 4096, triton=[0.98, 0.975]),
    row("causal", 256, 16, 8192, triton=[1.2, 0.96]),
    row("causal", 320, 16, 512, triton=[1.4, 0.5]),
    row("causal", 320, 16, 4096, triton=[2.0, 2.0]),
    row("causal", 512, 1, 512, triton=[0.5, 0.5]),
    row("causal", 512, 1, 4096, triton=[1.1, 1.2]),
    row("causal", 512, 16, 512, triton=[1.4, 1.1], cute=[1.2, 1.3]),
    row("causal", 512, 16, 4096, triton=[3.0, 4.0], cute=[4.0, 3.0]),
    row("causal", 512, 32, 4096, triton=[0.9, 0.9], grouped=True),
    row("none", 512, 16, 512, triton=[0.9, 0.9]),
    row("none", 512, 16, 2048, triton=[2.0, 2.0]),
    row("none", 512, 16, 64, 4096, triton=[0.7, 2.0]),
    row("none", 512, 16, 512, 4096, triton=[1.2, 2.0]),
    row("none", 512, 16, 64, 16384, triton=[1.3, 2.0]),
    row("none", 512, 16, 512, 16384, triton=[1.4, 2.0]),
    row("none", 512, 16, 4096, 128, triton=[1.4, 2.0]),
    row("none", 512, 16, 1, 8192, triton=[5.0, 1.1]),
    row("window", 512, 16, 512, triton=[9.0, 9.0]),
    row("padded", 512, 16, 512, triton=[0.9, 9.0]),
    row("window", 512, 16, 8192, triton=[9.0, 9.0]),
    row("bool", 512, 16, 2048, triton=[1.5, 1.5]),
]


@pytest.fixture
def table(tmp_path, monkeypatch):
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "nvidia-h200.json").write_text(json.dumps({"rows": ROWS}))
    monkeypatch.setattr(preferences, "_TABLES", shipped)
    with settings.override(cache_dir=str(tmp_path / "kept")):
        preferences.forget()
        yield shipped
    preferences.forget()


CALL = AttentionCall(
    batch=1, q_heads=16, kv_heads=16, q_len=4096, kv_len=4096, head_dim=512, value_dim=512, dtype=torch.bfloat16,
    capability=(9, 0), device_name=GPU, is_causal=True,
)  # fmt: skip
BOTH, CUTE = ("triton", "cute", "sdpa"), ("cute", "triton", "sdpa")
YES, NO = ("triton", "sdpa"), ("sdpa", "triton")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, BOTH),
        ({"q_len": 10**6, "kv_len": 10**6}, BOTH),  # beyond the longest: as the longest
        ({"q_len": 4000}, CUTE),  # between 512 and 4096 both count: the least gain both ways decides the order
        ({"kv_len": 4000}, CUTE),
        ({"q_len": 512, "kv_len": 512}, CUTE),
        ({"q_len": 300, "kv_len": 300}, ("sdpa", "cute", "triton")),  # shorter than anything measured
        ({"head_dim": 320, "value_dim": 320}, YES),
        ({"head_dim": 320, "value_dim": 320, "q_len": 2048}, NO),  # good at 4096 only
        ({"head_dim": 384, "value_dim": 384, "q_len": 512, "kv_len": 512}, ("sdpa", "triton", "cute")),
        ({"head_dim": 384, "value_dim": 384}, ("triton", "sdpa", "cute")),  # cute was not measured at 320
        ({"head_dim": 264, "value_dim": 264}, YES),  # above 256 the first measured head dim counts alone
        ({"head_dim": 256}, YES),  # within the noise
        ({"head_dim": 256, "q_len": 2048}, NO),
        ({"head_dim": 256, "q_len": 8192, "kv_len": 8192}, NO),  # slower with its backward
        ({"head_dim": 72}, YES),
        ({"batch": 2, "q_heads": 8, "kv_heads": 8}, BOTH),  # batch times heads
        ({"q_heads": 1, "kv_heads": 1}, YES),
        ({"q_heads": 8, "kv_heads": 8}, ("triton", "sdpa", "cute")),  # between 1 and 16
        ({"q_heads": 8, "kv_heads": 8, "q_len": 2048}, ("sdpa", "triton", "cute")),
        ({"q_heads": 64, "kv_heads": 64}, BOTH),  # more heads than measured: as the most
        ({"q_heads": 32, "kv_heads": 4}, NO),  # groups have points of their own
        ({"q_heads": 16, "kv_heads": 4}, BOTH),  # and fall back to the others where those do not reach
        ({"is_causal": False}, YES),
        ({"is_causal": False, "q_len": 1000, "kv_len": 1000}, NO),
        ({"is_causal": False, "q_len": 512, "kv_len": 4096}, YES),
        ({"is_causal": False, "q_len": 500, "kv_len": 4096}, NO),
        ({"is_causal": False, "q_len": 512, "kv_len": 5000}, YES),
        ({"is_causal": False, "q_len": 64, "kv_len": 16384}, YES),
        ({"is_causal": False, "q_len": 64, "kv_len": 10000}, NO),
        ({"is_causal": False, "q_len": 32, "kv_len": 16384}, NO),
        ({"is_causal": False, "q_len": 512, "kv_len": 2048}, NO),  # fewer keys than measured: by the shorter length
        ({"is_causal": False, "q_len": 9000, "kv_len": 128}, YES),
        ({"is_causal": False, "q_len": 1024, "kv_len": 128}, NO),
        ({"is_causal": False, "q_len": 1, "kv_len": 8192}, YES),
        ({"is_causal": False, "q_len": 7, "kv_len": 90000}, YES),
        ({"is_causal": False, "mask_kind": "intervals", "q_len": 512, "kv_len": 512}, NO),  # padding loses
        ({"is_causal": False, "mask_kind": "intervals", "q_len": 8192, "kv_len": 8192}, YES),
        ({"is_causal": False, "mask_kind": "bool", "q_len": 2048, "kv_len": 2048}, YES),
        ({"dtype": torch.float16}, BOTH),
        ({"needs_grad": True}, BOTH),
    ],
    ids=str,
)
def test_a_call_takes_the_order_that_every_neighbour_agrees_on(table, changes, expected):
    assert preferences.prefer(replace(CALL, **changes)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"device_name": "NVIDIA L4"},
        {"device_type": "cpu", "capability": None},
        {"head_dim": 1024},  # above the largest
        {"is_causal": False, "q_heads": 4, "kv_heads": 4},  # fewer heads than measured
        {"is_causal": False, "q_len": 1, "kv_len": 1024},  # 8192 is the shortest, and long
        {"is_causal": False, "mask_kind": "bool", "q_len": 512, "kv_len": 512},
        {"is_causal": False, "mask_kind": "bool", "q_len": 1, "kv_len": 8192},
        {"is_causal": False, "mask_kind": "additive", "has_bias": True},
        {"dropout_p": 0.1},
        {"softcap": 30.0},
        {"return_lse": True},
        {"has_sinks": True},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_what_was_not_measured_has_no_preference(table, changes):
    assert preferences.prefer(replace(CALL, **changes)) is None


def test_nothing_is_concluded_across_the_head_dim_where_torchs_kernels_end(table):
    (table / "nvidia-h200.json").write_text(
        json.dumps({"rows": [row("none", 128, 16, 512, triton=[2.0, 2.0]), row("none", 512, 16, 512, triton=[0.5, 1])]})
    )
    preferences.forget()
    call = replace(CALL, is_causal=False)
    assert preferences.prefer(replace(call, head_dim=128)) == YES
    assert preferences.prefer(replace(call, head_dim=264)) == NO
    for head_dim in (136, 256, 520):
        assert preferences.prefer(replace(call, head_dim=head_dim)) is None


def test_the_forward_choice_does_not_depend_on_grad_mode(table):
    for head_dim in (256, 512):
        call = replace(CALL, head_dim=head_dim)
        assert preferences.prefer(call) == preferences.prefer(replace(call, needs_grad=True))


def test_a_kernel_is_never_chosen_beside_a_point_where_it_loses(table):
    """Thresholds against the definition, over a grid of calls around every measured point."""
    lengths = (100, 511, 512, 513, 4095, 4096, 4097, 8192, 20000)
    for head_dim, lanes, length in itertools.product((256, 264, 320, 400, 512), (1, 2, 15, 16, 17), lengths):
        call = replace(CALL, head_dim=head_dim, q_heads=lanes, kv_heads=lanes, q_len=length, kv_len=length)
        order = preferences.prefer(call)
        if order is None or order[0] == "sdpa":
            continue
        same = [r for r in ROWS if r["mask"] == "causal" and not r["grouped"] and r["q_len"] == r["kv_len"]]
        sides = [r for r in same if (r["head_dim"] <= 256) == (head_dim <= 256)]

        def near(values, at):
            below = [v for v in values if v <= at]
            above = [v for v in values if v >= at]
            return {max(below) if below else None, min(above) if above else None} - {None}

        for d in near({r["head_dim"] for r in sides}, head_dim):
            for heads in near({r["lanes"] for r in sides if r["head_dim"] == d}, lanes):
                line = {r["q_len"]: r for r in sides if (r["head_dim"], r["lanes"]) == (d, heads)}
                for n in near(set(line), length):
                    assert min(line[n]["speedups"][order[0]]) >= 1 / preferences.NOISE, (call, line[n])


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"rows": 3}', '{"rows": [{}]}', '{"rows": [{"mask": "none"}]}', '{"rows": [null]}',
     json.dumps({"rows": [{**ROWS[0], "speedups": {}}, {**ROWS[0], "lanes": "16"}, {**ROWS[0], "mask": "x"},
                          {**ROWS[0], "speedups": {"triton": [1.0]}}, {**ROWS[0], "speedups": {"triton": [0, 1]}}]})],
)  # fmt: skip
def test_a_damaged_table_measures_nothing(table, content):
    (table / "nvidia-h200.json").write_text(content)
    preferences.forget()
    assert preferences.prefer(CALL) is None and not preferences.has_table(GPU)


def test_steps_exist_only_where_the_order_changes(table):
    rows = [row("none", 512, 16, n, triton=[s, s]) for n, s in ((512, 0.5), (1024, 0.6), (2048, 2.0), (4096, 3.0))]
    ((_, bands),) = preferences.compact(rows).items()
    exact = next(band for band in bands if band.head_dim == 512)
    entry = next(entry for entry in exact.lanes if entry.most == 16)
    assert [(step.u, step.order) for step in entry.steps] == [(0, NO), (2048, YES)]


# --- this user's table ------------------------------------------------------------------------------------------------


def test_this_users_rows_win_over_the_shipped_ones(table):
    before = generation()
    preferences.keep(GPU, [row("causal", 512, 16, 4096, triton=[0.5, 0.5], cute=[0.4, 0.4])])
    assert generation() > before, "plans are made anew"
    assert preferences.prefer(CALL) == ("sdpa", "triton", "cute")
    assert preferences.prefer(replace(CALL, q_len=512, kv_len=512)) == CUTE
    preferences.keep(GPU, [row("none", 512, 4, 512, triton=[2.0, 2.0])])
    assert preferences.prefer(CALL) == ("sdpa", "triton", "cute"), "older rows stay"
    assert preferences.has_own(GPU, "sweep_d512_h16_g1_q4096_k4096_causal")
    assert not preferences.has_own(GPU, "sweep_d512_h16_g2_q4096_k4096_causal")
    assert not preferences.has_own(GPU, "d512_self_8k")


def test_rows_of_other_kernels_are_ignored(table, monkeypatch):
    preferences.keep(GPU, [row("causal", 512, 16, 4096, triton=[0.5, 0.5])])
    monkeypatch.setattr(qualification, "source_hash", lambda family: "0123456789abcdef")
    preferences.forget()
    assert preferences.prefer(CALL) == BOTH


def test_shipped_tables_can_be_read():
    for path in (preferences.Path(preferences.__file__).parent / "tables").glob("*.json"):
        if path.name.startswith("triton-"):
            continue
        content = json.loads(path.read_text())
        assert path.name == f"{preferences.store.slug(content['device'])}.json"
        assert content["rows"] and all(preferences._is_row(one) for one in content["rows"])
        assert preferences.compact(content["rows"])


# --- torch.compile ----------------------------------------------------------------------------------------------------


def test_a_new_length_costs_at_most_one_recompile(table):
    from torch._dynamo.testing import CompileCounter

    bands = (Band(512, (Lanes(1 << 62, (Step(8, 0, NO), Step(64, 0, YES))),)),)

    def function(x):
        return x + 1 if lookup(bands, 512, 16, x.shape[0], 0) == YES else x - 1

    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in (65, 80, 300, 7000):
        assert compiled(torch.zeros(length))[0].item() == 1
    assert counter.frame_count <= 2


@pytest.mark.parametrize(("kv_heads", "lengths"), [(16, (4096, 8192, 9000)), (4, (4200, 5000, 8192))])
def test_prefer_can_be_traced(table, kv_heads, lengths):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()

    def function(x):
        call = AttentionCall(
            batch=1, q_heads=16, kv_heads=kv_heads, q_len=x.shape[0], kv_len=x.shape[0], head_dim=512, value_dim=512,
            dtype=torch.bfloat16, capability=(9, 0), device_name=GPU, is_causal=True,
        )  # fmt: skip
        return x + 1 if preferences.prefer(call) == BOTH else x - 1

    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in lengths:
        assert compiled(torch.zeros(length))[0].item() == 1
    assert counter.frame_count <= 2


# --- building ---------------------------------------------------------------------------------------------------------


def results_file(path, device=GPU, **times):
    """case -> (provider, direction) -> ms"""
    rows = [
        {"case": case, "direction": direction, "provider": provider, "ms": ms}
        for case, found in times.items()
        for (provider, direction), ms in found.items()
    ]
    content = {"device": device, "date": "2026-11-30T00:00:00+00:00", "command": "c", "versions": {}, "rows": rows}
    path.write_text(json.dumps(content))
    return path


TIMES = {
    ("sdpa", "fwd"): 10.0,
    ("sdpa", "fwd+bwd"): 40.0,
    ("ffpa_hf/triton", "fwd"): 5.0,
    ("ffpa_hf/triton", "fwd+bwd"): 20.0,
    ("ffpa_hf/auto", "fwd"): 5.0,
    ("ffpa_hf/auto", "fwd+bwd"): 20.0,
}
CASE = "sweep_d512_h16_g1_q4096_k4096_causal"


def test_a_table_is_built_from_a_sweep_and_read_back(tmp_path, monkeypatch, capsys):
    first = results_file(
        tmp_path / "a.json",
        sweep_d512_h16_g1_q4096_k4096_causal=TIMES,
        sweep_d512_h16_g1_q512_k512_none={**TIMES, ("ffpa_hf/triton", "fwd+bwd"): None},
        sweep_d512_h16_g1_q512_k512_additive=TIMES,
        d512_self_8k=TIMES,
    )
    second = results_file(tmp_path / "b.json", **{CASE: {**TIMES, ("ffpa_hf/triton", "fwd"): 4.0}})
    arguments = ["--from", str(first), str(second), "--tables", str(tmp_path)]
    assert preferences.main(arguments) == 0
    assert "triton, sdpa" in capsys.readouterr().out
    table = json.loads((tmp_path / "nvidia-h200.json").read_text())
    assert table["device"] == GPU and table["sources"]["triton"] == qualification.source_hash("triton")
    assert table["rows"] == [row("causal", 512, 16, 4096, triton=[2.5, 2.0])]
    monkeypatch.setattr(preferences, "_TABLES", tmp_path)
    preferences.forget()
    assert preferences.prefer(CALL) == ("triton", "sdpa")
    preferences.forget()


def test_a_kernel_is_compared_with_the_route_that_would_run_instead():
    """Where ours makes a mask before it calls F.sdpa, plain F.sdpa is not what auto would run."""
    timed = {**TIMES, ("ffpa_hf/sdpa", "fwd"): 15.0, ("ffpa_hf/sdpa", "fwd+bwd"): 50.0}
    (built,) = preferences.rows_from((CASE, way, provider, ms) for (provider, way), ms in timed.items())
    assert built["speedups"] == {"triton": [3.0, 2.5]}


def test_a_backward_timed_alone_is_added(tmp_path):
    times = {key: ms for key, ms in TIMES.items() if key[1] == "fwd"}
    times |= {("sdpa", "bwd"): 30.0, ("ffpa_hf/triton", "bwd"): 20.0}
    (built,) = preferences.rows_from((CASE, way, provider, ms) for (provider, way), ms in times.items())
    assert built["speedups"] == {"triton": [2.0, 1.6]}


def test_results_of_two_devices_or_of_no_sweep_make_no_table(tmp_path, capsys):
    first = results_file(tmp_path / "a.json", **{CASE: TIMES})
    other = results_file(tmp_path / "b.json", device="NVIDIA L4", **{CASE: TIMES})
    none = results_file(tmp_path / "c.json", d512_self_8k=TIMES)
    for files in ((first, other), (none,), (tmp_path / "missing.json",)):
        assert preferences.main(["--from", *map(str, files), "--tables", str(tmp_path)]) == 1
        assert "no table" in capsys.readouterr().err
    assert not list(tmp_path.glob("nvidia*"))


def test_every_sweep_case_becomes_a_row_that_serves_its_own_shape(table):
    timed = [
        (case.id, way, provider, ms)
        for case in cases.SWEEP
        for (provider, way), ms in TIMES.items()
        if case.mask != "additive"
    ]
    rows = preferences.rows_from(timed)
    assert len(rows) == len(cases.SWEEP) - sum(case.mask == "additive" for case in cases.SWEEP)
    (table / "nvidia-h200.json").write_text(json.dumps({"rows": rows}))
    preferences.forget()
    for case in cases.SWEEP:
        if case.mask == "additive":
            continue
        kind = {"window": "intervals", "padded": "intervals", "bool": "bool"}.get(case.mask, "none")
        call = replace(
            CALL, q_heads=case.heads, kv_heads=case.kv_heads, q_len=case.q_len, kv_len=case.kv_len,
            head_dim=case.head_dim, is_causal=case.mask == "causal", mask_kind=kind,
        )  # fmt: skip
        assert preferences.prefer(call) == YES, case.id


def test_the_sweep_covers_what_it_promises():
    assert len(cases.SWEEP) >= 60
    assert {case.mask for case in cases.SWEEP} == {"none", "causal", "window", "padded", "bool", "additive"}
    assert {64, 1024} <= {case.head_dim for case in cases.SWEEP}
    lengths = {case.kv_len for case in cases.SWEEP}
    assert min(lengths) == 128 and max(lengths) == 32768
    assert any(case.q_len == 1 and case.group > 1 for case in cases.SWEEP)
