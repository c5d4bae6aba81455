"""What ffpa_hf.report() tells after calls: counts per module, backend and reason; nothing about what did not run."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import ffpa_hf
from ffpa_hf import ffpa_attn_func
from ffpa_hf.dispatch import Route
from ffpa_hf.functional import attend
from ffpa_hf.report import not_accelerated


class Layer(nn.Module):
    def __init__(self, route: Route | None = None) -> None:
        super().__init__()
        self.route = route

    def forward(self, tensor, **options):
        return attend(tensor, tensor, tensor, route=self.route, site=self, **options)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = Layer(), nn.ModuleList([Layer(), Layer()])

    def forward(self, tensor):
        return self.blocks[1](self.blocks[0](self.first(tensor)), is_causal=True)


class Pipeline:
    def __init__(self, **components) -> None:
        self.components = components


def tensor(rows: int = 6) -> torch.Tensor:
    return torch.randn(1, 2, rows, 64)


def test_nothing_counted_says_so():
    assert len(ffpa_hf.report()) == 0 and str(ffpa_hf.report()) == "No attention call was counted."
    assert len(ffpa_hf.report(Model())) == 0


def test_every_call_since_import_is_counted_once():
    for _ in range(3):
        ffpa_attn_func(tensor(), tensor(), tensor())
    ffpa_attn_func(tensor(9), tensor(9), tensor(9), backend="sdpa")
    report = ffpa_hf.report()
    assert sorted(row.calls for row in report) == [1, 3]
    assert report.backends() == {"sdpa": 4}
    assert {row.reason for row in report} == {"no kernel for tensors on cpu", "asked for"}
    assert any("N6" in row.shape for row in report) and any("N9" in row.shape for row in report)


def test_a_module_is_named_by_its_place_and_class():
    model = Model()
    model(tensor())
    model(tensor())
    report = ffpa_hf.report(model)
    assert [(row.module_name, row.module_class, row.calls) for row in report] == [
        ("first", "Layer", 2),
        ("blocks.0", "Layer", 2),
        ("blocks.1", "Layer", 2),
    ]
    assert "causal" in report.rows[2].shape and "causal" not in report.rows[0].shape
    assert [row.backward for row in report] == ["sdpa"] * 3


def test_calls_of_other_models_are_left_out():
    one, two = Model(), Model()
    one(tensor())
    assert len(ffpa_hf.report(one)) == 3 and len(ffpa_hf.report(two)) == 0


def test_a_pipeline_is_walked_by_component():
    unet, vae = Model(), Layer()
    unet(tensor())
    vae(tensor())
    report = ffpa_hf.report(Pipeline(unet=unet, vae=vae, scheduler=object()))
    assert [row.module_name for row in report] == ["unet.first", "unet.blocks.0", "unet.blocks.1", "vae"]


def test_what_is_left_alone_is_listed_with_its_reason():
    model = Model()
    not_accelerated(model.first, "its attention keeps a running state")
    (row,) = ffpa_hf.report(model)
    assert (row.module_name, row.backend, row.calls) == ("first", "native", 0)
    assert row.reason == "its attention keeps a running state"


def test_a_preference_that_could_not_serve_is_named_with_what_ran(recwarn):
    layer = Layer(Route("cute"))
    layer(tensor())
    (row,) = ffpa_hf.report(layer)
    assert row.backend == "sdpa" and not recwarn.list


def test_a_call_that_raises_is_not_counted():
    with pytest.raises(TypeError):
        ffpa_attn_func(tensor(), tensor(), tensor(), backend="cute")
    assert len(ffpa_hf.report()) == 0


def test_the_table_shows_every_row():
    model = Model()
    model(tensor())
    lines = str(ffpa_hf.report(model)).splitlines()
    assert len(lines) == 4 and lines[0].split() == [
        "module",
        "class",
        "calls",
        "served",
        "by",
        "backward",
        "shapes",
        "why",
    ]
    assert "blocks.1" in lines[3] and "sdpa" in lines[3] and "B1 H2 N6 D64 float32 causal" in lines[3]


def test_counting_keeps_no_module_alive():
    layer = Layer()
    layer(tensor())
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None
    assert ffpa_hf.report().backends() == {"sdpa": 1}


def test_something_that_is_no_model_raises():
    with pytest.raises(TypeError, match="report takes a torch module or a diffusers pipeline, not list"):
        ffpa_hf.report([])


def test_decoding_makes_one_row_however_many_tokens():
    key = torch.randn(1, 2, 40, 64)
    for length in range(1, 41):
        ffpa_attn_func(key[:, :, :1], key[:, :, :length], key[:, :, :length])
    (row,) = ffpa_hf.report().rows
    assert row.calls == 40 and "N1x1..40" in row.shape
