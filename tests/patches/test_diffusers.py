"""ffpa_hf.enable and disable on diffusers models and pipelines: everything reached, everything given back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[1] / "processors"))

import diffusers_models as tiny  # noqa: E402
import tiny_pipeline  # noqa: E402
from diffusers.models import attention_processor as legacy  # noqa: E402

import ffpa_hf  # noqa: E402
from ffpa_hf import FFPAAttnProcessor, TritonBackend  # noqa: E402
from ffpa_hf.processors import capture  # noqa: E402

TOLERANCE = 1e-5


def snapshot(model: Any) -> list[tuple[str, type, int, tuple[str, ...]]]:
    """What must come back: every module's class, its processor object, and the names on it."""
    return [
        (name, type(module), id(getattr(module, "processor", None)), tuple(vars(module)))
        for name, module in model.named_modules()
    ]


@pytest.fixture
def pipe() -> Any:
    return tiny_pipeline.build()


def test_enable_reaches_every_component_of_a_pipeline_and_disable_gives_everything_back(pipe):
    models = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    before = {name: snapshot(model) for name, model in models.items()}
    keys = {name: list(model.state_dict()) for name, model in models.items()}
    implementation = pipe.text_encoder.config._attn_implementation
    with tiny.AttentionOps() as ops:
        expected = tiny_pipeline.generate(pipe)

    assert ffpa_hf.enable(pipe, backend="triton") is pipe
    result = tiny_pipeline.generate(pipe)
    rows = ffpa_hf.report(pipe).rows
    assert sum(row.calls for row in rows) == ops.count, "some attention did not go through attend"
    assert {row.module_name.split(".")[0] for row in rows} == set(models)
    assert (result - expected).abs().max() <= TOLERANCE
    assert {name: list(model.state_dict()) for name, model in models.items()} == keys
    for model in (pipe.unet, pipe.vae):  # one each: diffusers writes a model's backend and parallelism on it
        owners = set(model.attn_processors.values())
        assert len(owners) == 1 and owners.pop().route.backend == TritonBackend()

    ffpa_hf.disable(pipe)
    assert {name: snapshot(model) for name, model in models.items()} == before
    assert pipe.text_encoder.config._attn_implementation == implementation
    assert torch.equal(tiny_pipeline.generate(pipe), expected)


@pytest.mark.parametrize(("option", "left_alone"), [("vae", "vae"), ("text_encoders", "text_encoder")])
def test_parts_of_a_pipeline_can_be_left_out(pipe, option, left_alone):
    ffpa_hf.enable(pipe, **{option: False})
    tiny_pipeline.generate(pipe)
    served = {row.module_name.split(".")[0] for row in ffpa_hf.report(pipe)}
    assert served == {"vae", "text_encoder", "unet"} - {left_alone}


def test_an_encoder_that_cannot_switch_is_named_and_does_not_stop_the_rest(pipe, monkeypatch):
    from ffpa_hf.patches import transformers as patch

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("computes its attention itself")

    monkeypatch.setattr(patch, "enable", refuse)
    ffpa_hf.enable(pipe)
    rows = {row.module_name: row.reason for row in ffpa_hf.report(pipe)}
    assert "computes its attention itself" in rows["text_encoder"]
    assert capture.slot_of(pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1) is not None
    monkeypatch.undo()
    ffpa_hf.disable(pipe)


def test_an_exception_halfway_leaves_nothing_behind(pipe, monkeypatch):
    before = [snapshot(pipe.unet), snapshot(pipe.vae)]
    enable, seen = capture.enable, []

    def third_time_unlucky(module: Any, owner: Any) -> None:
        seen.append(module)
        if len(seen) == 3:
            raise KeyboardInterrupt
        enable(module, owner)

    monkeypatch.setattr(capture, "enable", third_time_unlucky)
    with pytest.raises(KeyboardInterrupt):
        ffpa_hf.enable(pipe)
    assert [snapshot(pipe.unet), snapshot(pipe.vae)] == before


def test_the_context_manager_also_undoes_after_an_exception(pipe):
    before = [snapshot(pipe.unet), snapshot(pipe.vae)]
    with pytest.raises(ZeroDivisionError), ffpa_hf.enabled(pipe, backend="sdpa"):
        assert isinstance(next(iter(pipe.unet.attn_processors.values())), FFPAAttnProcessor)
        raise ZeroDivisionError
    assert [snapshot(pipe.unet), snapshot(pipe.vae)] == before


def test_unknown_options_and_precisions_without_kernels_are_refused(pipe):
    before = snapshot(pipe.unet)
    with pytest.raises(TypeError, match="no option 'speed'"):
        ffpa_hf.enable(pipe, speed=2)
    with pytest.raises(NotImplementedError, match="not built yet"):
        ffpa_hf.enable(pipe, precision="fp4")
    with pytest.raises(ValueError, match="precision='int3'"):
        ffpa_hf.enable(pipe, precision="int3")
    with pytest.raises(ValueError, match="give precision"):
        ffpa_hf.enable(pipe, skip_first_steps=2)
    with pytest.raises(ValueError, match="give precision"):
        ffpa_hf.enable(pipe, skip_layers=["mid_block"])
    with pytest.raises(TypeError, match="neither"):
        ffpa_hf.enable(torch.nn.Linear(2, 2))
    assert snapshot(pipe.unet) == before


@pytest.mark.parametrize("name", [*tiny.EVERY])
def test_every_attention_of_a_model_is_reached_and_given_back(name, monkeypatch):
    model, inputs = tiny.make(name)
    with torch.no_grad():
        with tiny.AttentionOps() as ops:
            expected = tiny.run(model, inputs)
        before, keys = snapshot(model), list(model.state_dict())
        ffpa_hf.enable(model)
        with tiny.counted(monkeypatch) as calls:
            result = tiny.run(model, inputs)
        assert len(calls) == ops.count
        assert (result - expected).abs().max() <= TOLERANCE
        assert list(model.state_dict()) == keys
        ffpa_hf.disable(model)
        assert snapshot(model) == before
        with tiny.counted(monkeypatch) as calls:
            assert torch.equal(tiny.run(model, inputs), expected)
    assert calls == []


@pytest.mark.parametrize("name", ["vae_wan", "vae_qwen_image", "vae_cosmos"])
def test_gradients_through_inline_attention(name):
    model, inputs = tiny.make(name)
    gradients = []
    for accelerated in (False, True):
        if accelerated:
            ffpa_hf.enable(model)
        sample = inputs["sample"].clone().requires_grad_(True)
        tiny.run(model, {"sample": sample}).square().sum().backward()
        gradients.append(sample.grad)
    assert (gradients[0] - gradients[1]).abs().max() <= TOLERANCE * max(1, gradients[0].abs().max().item())


def test_enable_is_per_model():
    one, inputs = tiny.make("vae_kl")
    other, _ = tiny.make("vae_kl")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ffpa_hf.enable(one)
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    with torch.no_grad():
        tiny.run(other, inputs)
    assert len(ffpa_hf.report(other)) == 0
    assert not any(isinstance(p, FFPAAttnProcessor) for p in other.attn_processors.values())


def test_enabling_again_changes_the_route_and_disabling_once_is_enough():
    model, _ = tiny.make("wan")
    before = snapshot(model)
    ffpa_hf.enable(model)
    ffpa_hf.enable(model, backend="triton", strict=True)
    routes = {processor.route for processor in model.attn_processors.values()}
    assert [(route.backend, route.strict) for route in routes] == [(TritonBackend(), True)]
    ffpa_hf.disable(model)
    assert snapshot(model) == before
    ffpa_hf.disable(model)
    assert snapshot(model) == before


def test_disable_gives_back_a_processor_of_ours_that_was_set_by_hand(monkeypatch):
    model, inputs = tiny.make("unet_sdxl")
    plain = snapshot(model)
    mine = FFPAAttnProcessor("sdpa")
    model.set_attn_processor(mine)
    with ffpa_hf.enabled(model, backend="triton"):
        assert mine not in model.attn_processors.values()
    assert all(processor is mine for processor in model.attn_processors.values())
    with torch.no_grad(), tiny.counted(monkeypatch) as calls:
        tiny.run(model, inputs)
    assert calls and all(call["route"] is mine.route for call in calls)
    ffpa_hf.disable(model)
    assert snapshot(model) == plain


def test_disable_removes_what_set_attn_processor_installed():
    model, _ = tiny.make("flux")
    before = snapshot(model)
    model.set_attn_processor(FFPAAttnProcessor())
    ffpa_hf.disable(model)
    assert snapshot(model) == before


def test_processors_with_weights_survive_the_round_trip():
    """IP-Adapter keeps weights on its processors: names, order, objects and classes must not move."""
    model, _ = tiny.make("unet_sdxl")
    adapted = {}
    for name, processor in model.attn_processors.items():
        module = model.get_submodule(name.removesuffix(".processor"))
        adapted[name] = (
            legacy.IPAdapterAttnProcessor2_0(module.to_q.in_features, module.cross_attention_dim, num_tokens=(4,))
            if name.endswith("attn2.processor")
            else processor
        )
    model.set_attn_processor(dict(adapted))
    before, keys = snapshot(model), list(model.state_dict())
    assert any("to_k_ip" in key for key in keys)
    ffpa_hf.enable(model)
    assert list(model.state_dict()) == keys
    from_adapter = [p for p in model.attn_processors.values() if isinstance(p, legacy.IPAdapterAttnProcessor2_0)]
    assert len(from_adapter) == 8, "set_ip_adapter_scale would not find them"
    ffpa_hf.disable(model)
    assert snapshot(model) == before and list(model.state_dict()) == keys


def test_a_compiled_or_wrapped_model_is_recognised(monkeypatch):
    class Wrapper(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

    model, inputs = tiny.make("flux")
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        ffpa_hf.enable(Wrapper(model))
        with tiny.counted(monkeypatch) as calls:
            assert (tiny.run(model, inputs) - expected).abs().max() <= TOLERANCE
    assert len(calls) == 2
    compiled = torch.compile(model, backend="eager")
    ffpa_hf.disable(compiled)
    assert not any(capture.slot_of(module) for module in model.modules())


def test_attention_out_of_reach_is_reported():
    model, _ = tiny.make("vae_kl")
    model.pool = torch.nn.MultiheadAttention(8, 2)  # as ControlNet-Union has one
    ffpa_hf.enable(model)
    rows = {row.module_name: row.reason for row in ffpa_hf.report(model)}
    assert "multi_head_attention_forward" in rows["pool"]
    ffpa_hf.disable(model)
