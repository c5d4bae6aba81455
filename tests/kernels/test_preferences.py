"""Auto's measured preferences: built from a sweep, read by thresholds, traceable."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ffpa_hf.call import AttentionCall
from ffpa_hf.kernels.tuning import preferences
from ffpa_hf.kernels.tuning.preferences import Band, Step, lookup


def row(mask, head_dim, heads, length, **speedups):
    return {"mask": mask, "head_dim": head_dim, "heads": heads, "length": length, "speedups": speedups}


ROWS = [
    row("causal", 256, 16, 512, triton=[0.8, 0.9]),
    row("causal", 256, 16, 4096, triton=[0.98, 0.975]),
    row("causal", 256, 16, 8192, triton=[1.2, 0.96]),
    row("causal", 512, 16, 512, triton=[1.4, 1.1], cute=[1.2, 1.3]),
    row("causal", 512, 16, 1024, triton=[1.5, 1.2], cute=[1.3, 1.4]),
    row("causal", 512, 16, 4096, triton=[3.0, 4.0], cute=[4.0, 3.0]),
    row("none", 512, 16, 512, triton=[2.0, 2.0]),
    row("none", 512, 1, 512, triton=[0.5, 0.5]),
    row("window", 512, 16, 512, triton=[9.0, 9.0]),
]


@pytest.fixture
def table(tmp_path, monkeypatch):
    (tmp_path / "nvidia-h200.json").write_text(json.dumps({"rows": ROWS}))
    monkeypatch.setattr(preferences, "_TABLES", tmp_path)
    preferences.forget()
    yield tmp_path
    preferences.forget()


CALL = AttentionCall(
    batch=1, q_heads=16, kv_heads=16, q_len=4096, kv_len=4096, head_dim=512, value_dim=512, dtype=torch.bfloat16,
    capability=(9, 0), device_name="NVIDIA H200", is_causal=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("triton", "cute", "sdpa")),
        ({"q_len": 10**6, "kv_len": 10**6}, ("triton", "cute", "sdpa")),
        ({"q_len": 4095}, ("cute", "triton", "sdpa")),
        ({"kv_len": 700}, ("cute", "triton", "sdpa")),
        ({"head_dim": 320, "value_dim": 320}, ("triton", "cute", "sdpa")),  # the next measured head dim
        ({"head_dim": 256}, ("triton", "sdpa")),  # within the noise
        ({"head_dim": 256, "q_len": 2048}, ("sdpa", "triton")),
        ({"head_dim": 256, "q_len": 8192, "kv_len": 8192}, ("sdpa", "triton")),  # slower with its backward
        ({"batch": 2, "q_heads": 8, "kv_heads": 8}, ("triton", "cute", "sdpa")),
        ({"is_causal": False}, ("triton", "sdpa")),
        ({"is_causal": False, "q_heads": 1, "kv_heads": 1}, ("sdpa", "triton")),
        ({"is_causal": False, "mask_kind": "intervals"}, ("triton", "sdpa")),
        ({"dtype": torch.float16}, ("triton", "cute", "sdpa")),
        ({"needs_grad": True}, ("triton", "cute", "sdpa")),
    ],
    ids=str,
)
def test_a_measured_call_takes_the_measured_order(table, changes, expected):
    assert preferences.prefer(replace(CALL, **changes)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"device_name": "NVIDIA L4"},
        {"device_type": "cpu", "capability": None},
        {"head_dim": 1024},
        {"q_len": 300},
        {"q_len": 1},
        {"q_heads": 4, "kv_heads": 4},
        {"is_causal": False, "mask_kind": "bool"},
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


def test_the_forward_choice_does_not_depend_on_grad_mode(table):
    for head_dim in (256, 512):
        call = replace(CALL, head_dim=head_dim)
        assert preferences.prefer(call) == preferences.prefer(replace(call, needs_grad=True))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": [{}]}', '{"rows": [{"mask": "none"}]}'])
def test_a_damaged_table_measures_nothing(table, content):
    (table / "nvidia-h200.json").write_text(content)
    assert preferences.prefer(CALL) is None and not preferences.has_table("NVIDIA H200")


def test_steps_exist_only_where_the_order_changes():
    (band_256, band_512) = preferences.compact(ROWS)["causal"]
    assert [step.length for step in band_256.steps] == [512, 4096, 8192]
    assert [step.length for step in band_512.steps] == [512, 4096]


def test_shipped_tables_can_be_read():
    for path in preferences._TABLES.glob("*.json"):
        table = preferences.load(path)
        assert table, path.name
        assert path.name == f"{preferences.store.slug(json.loads(path.read_text())['device'])}.json"


def test_a_new_length_costs_at_most_one_recompile(table):
    from torch._dynamo.testing import CompileCounter

    bands = (Band(512, 1, (Step(8, ("sdpa",)), Step(64, ("triton", "sdpa")))),)

    def function(x):
        order = lookup(bands, 512, 16, x.shape[0], x.shape[0])
        return x + 1 if order == ("triton", "sdpa") else x - 1

    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in (65, 80, 300, 7000):
        assert compiled(torch.zeros(length))[0].item() == 1
    assert counter.frame_count <= 2


def test_prefer_can_be_traced(table):
    from torch._dynamo.testing import CompileCounter

    def function(x):
        call = AttentionCall(
            batch=1, q_heads=16, kv_heads=16, q_len=x.shape[0], kv_len=x.shape[0], head_dim=512, value_dim=512,
            dtype=torch.bfloat16, capability=(9, 0), device_name="NVIDIA H200", is_causal=True,
        )  # fmt: skip
        return x + 1 if preferences.prefer(call) == ("triton", "cute", "sdpa") else x - 1

    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    assert compiled(torch.zeros(4096))[0].item() == 1
    assert compiled(torch.zeros(8192))[0].item() == 1
    assert compiled(torch.zeros(9000))[0].item() == 1
    assert counter.frame_count <= 2


# --- building ---------------------------------------------------------------------------------------------------------


def results_file(path, device="NVIDIA H200", **times):
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
    ("sdpa", "bwd"): 30.0,
    ("ffpa_hf/triton", "fwd"): 5.0,
    ("ffpa_hf/triton", "bwd"): 20.0,
    ("ffpa_hf/auto", "fwd"): 5.0,
    ("ffpa_hf/auto", "bwd"): 20.0,
}


def test_a_table_is_built_from_a_sweep_and_read_back(tmp_path, monkeypatch, capsys):
    first = results_file(
        tmp_path / "a.json",
        sweep_d512_h16_causal_n512=TIMES,
        sweep_d512_h16_none_n512={**TIMES, ("ffpa_hf/triton", "bwd"): None},
        d512_self_8k=TIMES,
    )
    second = results_file(tmp_path / "b.json", sweep_d512_h16_causal_n512={**TIMES, ("ffpa_hf/triton", "fwd"): 4.0})
    arguments = ["--from", str(first), str(second), "--tables", str(tmp_path)]
    assert preferences.main(arguments) == 0
    assert "triton, sdpa" in capsys.readouterr().out
    table = json.loads((tmp_path / "nvidia-h200.json").read_text())
    assert table["device"] == "NVIDIA H200"
    assert table["rows"] == [row("causal", 512, 16, 512, triton=[2.5, round(40 / 24, 3)])]
    monkeypatch.setattr(preferences, "_TABLES", tmp_path)
    preferences.forget()
    assert preferences.prefer(CALL) == ("triton", "sdpa")
    preferences.forget()


def test_measured_both_ways_wins_over_the_sum(tmp_path):
    path = results_file(
        tmp_path / "a.json",
        sweep_d512_h16_causal_n512={**TIMES, ("sdpa", "fwd+bwd"): 50.0, ("ffpa_hf/triton", "fwd+bwd"): 20.0},
    )
    (built,) = preferences.build([json.loads(path.read_text())])["rows"]
    assert built["speedups"] == {"triton": [2.0, 2.5]}


def test_results_of_two_devices_or_of_no_sweep_make_no_table(tmp_path, capsys):
    first = results_file(tmp_path / "a.json", sweep_d512_h16_causal_n512=TIMES)
    other = results_file(tmp_path / "b.json", device="NVIDIA L4", sweep_d512_h16_causal_n512=TIMES)
    none = results_file(tmp_path / "c.json", d512_self_8k=TIMES)
    for files in ((first, other), (none,), (tmp_path / "missing.json",)):
        assert preferences.main(["--from", *map(str, files), "--tables", str(tmp_path)]) == 1
        assert "no table" in capsys.readouterr().err
    assert not list(tmp_path.glob("nvidia*"))


def test_every_sweep_case_can_become_a_row():
    from ffpa_hf.bench.cases import SWEEP

    for case in SWEEP:
        match = preferences._CASE.fullmatch(case.id)
        assert match is not None and int(match["heads"]) == case.heads * case.batch and match["mask"] == case.mask
        assert int(match["head_dim"]) == case.head_dim and int(match["length"]) == case.q_len == case.kv_len
