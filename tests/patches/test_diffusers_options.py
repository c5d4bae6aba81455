"""Options of ffpa_hf.enable on diffusers: fused projections, and where a quantised precision applies.

A fake that rounds to e4m3 stands in for the quantised kernels wherever the route asks for one.
"""

from __future__ import annotations

import copy
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[1] / "processors"))

import diffusers_models as tiny  # noqa: E402
import sweep  # noqa: E402
import tiny_pipeline  # noqa: E402
from diffusers.models.attention_processor import Attention  # noqa: E402
from torch._dynamo.testing import CompileCounter  # noqa: E402

import ffpa_hf  # noqa: E402
from ffpa_hf import CUDABackend, FFPAAttnProcessor, TritonBackend, settings  # noqa: E402
from ffpa_hf.dispatch import Route  # noqa: E402
from ffpa_hf.kernels import qualification  # noqa: E402
from ffpa_hf.processors import capture, precision, redirect  # noqa: E402

TOLERANCE = 1e-5


@pytest.fixture
def pipe() -> Any:
    return tiny_pipeline.build()


@pytest.fixture
def quantised(monkeypatch) -> list[tuple[Any, str]]:
    """Pretend that the quantised kernels exist; the calls that they would take, as (module, "fp8" or "fp4")."""
    taken: list[tuple[Any, str]] = []
    attend = redirect.attend

    def fake(query: Any, key: Any, value: Any, **more: Any) -> Any:
        wanted = more["route"].forward_backend
        if isinstance(wanted, CUDABackend) and wanted.quantised:
            taken.append((more["site"], "fp4" if wanted.enable_fp4 else "fp8"))
            query, key, value = (t.to(torch.float8_e4m3fn).to(t.dtype) for t in (query, key, value))
        return attend(query, key, value, **more)

    monkeypatch.setattr(redirect, "attend", fake)
    monkeypatch.setattr(precision, "BUILT", frozenset({"fp8", "fp4"}))
    monkeypatch.setattr(precision, "LONG", 10)
    return taken


def names_of(model: Any, taken: list[tuple[Any, str]]) -> set[str]:
    modules = {module for module, _ in taken}
    return {name for name, module in model.named_modules() if module in modules}


# --- precision --------------------------------------------------------------------------------------------------------


def test_precision_reaches_the_denoiser_and_nothing_else(pipe, quantised):
    plain = tiny_pipeline.generate(pipe)
    ffpa_hf.enable(pipe, precision="fp8")
    result = tiny_pipeline.generate(pipe)
    everywhere = {name.removesuffix(".processor") for name in pipe.unet.attn_processors}
    assert names_of(pipe.unet, quantised) == everywhere and {kind for _, kind in quantised} == {"fp8"}
    assert names_of(pipe.vae, quantised) == names_of(pipe.text_encoder, quantised) == set()
    assert 1e-4 < (result - plain).abs().max() < 0.5
    ffpa_hf.disable(pipe)
    quantised.clear()
    assert torch.equal(tiny_pipeline.generate(pipe), plain) and quantised == []


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["mid_block"], lambda name: name.startswith("mid_block.")),
        (["unet.down_blocks.1"], lambda name: name.startswith("down_blocks.1.")),
        (["*.attn2"], lambda name: name.endswith(".attn2")),
        ([0, -1], None),
        (["mid_block.attentions.0.transformer_blocks.0.attn1", "up_blocks"], None),
    ],
)
def test_skip_layers_by_name_pattern_and_index(pipe, quantised, skip, left):
    order = [name for name, module in pipe.unet.named_modules() if capture.holds_processor(module)]
    if skip == [0, -1]:
        expected = {order[0], order[-1]}
    elif left is None:
        expected = {skip[0]} | {name for name in order if name.startswith("up_blocks.")}
    else:
        expected = {name for name in order if left(name)}
    assert 0 < len(expected) < len(order)
    ffpa_hf.enable(pipe, precision="fp4", skip_layers=skip)
    tiny_pipeline.generate(pipe)
    assert set(order) - names_of(pipe.unet, quantised) == expected
    assert {kind for _, kind in quantised} == {"fp4"}


def test_skip_first_steps_counts_the_schedulers_steps(pipe, quantised):
    scheduler, kind = pipe.scheduler, type(pipe.scheduler)
    processors = len(pipe.unet.attn_processors)
    ffpa_hf.enable(pipe, precision="fp8", skip_first_steps=2)
    for _ in range(2):  # every run starts from zero
        quantised.clear()
        tiny_pipeline.generate(pipe, steps=5)
        assert len(quantised) == 3 * processors  # guidance runs in one batch: one forward per step
    quantised.clear()
    tiny_pipeline.generate(pipe, steps=2)
    assert quantised == []
    assert isinstance(pipe.scheduler, kind) and type(pipe.scheduler).__name__ == kind.__name__
    ffpa_hf.disable(pipe)
    assert pipe.scheduler is scheduler and type(scheduler) is kind
    assert not [name for name in vars(scheduler) if name.startswith("_ffpa")]


def test_a_copied_scheduler_counts_for_itself(pipe, quantised):
    """Pipelines with sound copy the scheduler; its steps must be neither the picture's nor lost."""
    ffpa_hf.enable(pipe, precision="fp8", skip_first_steps=1)
    pipe.scheduler.set_timesteps(4)
    for twin in (copy.deepcopy(pipe.scheduler), pickle.loads(pickle.dumps(pipe.scheduler))):
        sample = torch.randn(1, 4, 8, 8)
        expected = pipe.scheduler.step(sample, pipe.scheduler.timesteps[0], sample).prev_sample
        assert torch.equal(twin.step(sample, twin.timesteps[0], sample).prev_sample, expected)
    assert vars(pipe.scheduler)["_ffpa_steps"].done == 2
    assert vars(twin)["_ffpa_steps"].done == 1


def test_schedulers_keep_their_signature_and_their_config(pipe, quantised, tmp_path):
    import inspect

    before = inspect.signature(pipe.scheduler.step), inspect.signature(pipe.scheduler.set_timesteps)
    ffpa_hf.enable(pipe, precision="fp8", skip_first_steps=1)
    assert (inspect.signature(pipe.scheduler.step), inspect.signature(pipe.scheduler.set_timesteps)) == before
    pipe.scheduler.save_pretrained(tmp_path)
    again = type(pipe.scheduler).__mro__[1].from_pretrained(tmp_path)
    told = [{k: v for k, v in s.config.items() if k[0] != "_"} for s in (again, pipe.scheduler)]
    assert told[0] == told[1] and len(told[0]) > 10
    assert again.config["_class_name"] == "DDIMScheduler"


def test_auto_quantises_long_sequences_only(pipe, quantised, monkeypatch):
    attend, lengths = redirect.attend, {}

    def watch(query: Any, key: Any, value: Any, **more: Any) -> Any:
        lengths.setdefault(more["site"], set()).add(key.shape[-2])
        return attend(query, key, value, **more)

    monkeypatch.setattr(redirect, "attend", watch)
    ffpa_hf.enable(pipe, precision="auto", skip_layers=["up_blocks.0.attentions.1"], skip_first_steps=1)
    tiny_pipeline.generate(pipe, steps=2)
    long = {
        name
        for name, module in pipe.unet.named_modules()
        if module in lengths and max(lengths[module]) >= precision.LONG
    }
    assert names_of(pipe.unet, quantised) == long - {"up_blocks.0.attentions.1.transformer_blocks.0.attn1"}
    assert 0 < len(long) < len(pipe.unet.attn_processors)


def test_a_precision_keeps_the_backward_and_the_configuration_that_were_asked_for(quantised):
    model, inputs = tiny.make("flux")
    mine = CUDABackend(smooth_k=False)
    ffpa_hf.enable(model, precision="fp8", backend=mine, backward_backend="triton", strict=True)
    (owner,) = set(model.attn_processors.values())
    assert owner.route.forward_backend == CUDABackend(smooth_k=False, enable_fp8=True)
    assert owner.route.backward_backend == TritonBackend() and owner.route.strict
    ffpa_hf.disable(model)
    with pytest.raises(ValueError, match="precision='fp8' runs on the CUDA backend"):
        ffpa_hf.enable(model, precision="fp8", backend="triton")


def test_inline_attention_is_quantised_where_the_model_itself_is_asked(quantised):
    model, inputs = tiny.make("vae_wan")
    ffpa_hf.enable(model, precision="fp8", skip_layers=[0])
    sweep.run(model, inputs)
    assert names_of(model, quantised) == {"decoder.mid_block.attentions.0"}


def test_one_flip_means_one_more_graph():
    """The step counter must not be a number that torch.compile guards on."""
    attention = Attention(16, heads=2, dim_head=8)
    steps = precision.Steps(skip=2)
    fp8 = Route(forward_backend=CUDABackend(enable_fp8=True))
    attention.set_processor(precision.QuantisedProcessor(Route("sdpa"), fp8, steps))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled, hidden = torch.compile(attention, backend=counter, fullgraph=True), torch.randn(1, 5, 16)
    with torch.no_grad():
        for _ in range(6):
            compiled(hidden)
            steps.step()
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"precision": "fp8", "skip_layers": ["nowhere"]}, ValueError, "match no attention module"),
        ({"precision": "fp8", "skip_layers": [99]}, ValueError, "match no attention module"),
        ({"precision": "fp8", "skip_layers": "mid_block"}, TypeError, "list of names"),
        ({"precision": "fp8", "skip_layers": [1.5]}, TypeError, "neither a name nor an index"),
        ({"precision": "fp8", "skip_first_steps": -1}, ValueError, "whole number"),
        ({"precision": "fp8", "skip_first_steps": True}, ValueError, "whole number"),
        ({"precision": "int3"}, ValueError, "'fp8', 'fp4' or 'auto'"),
    ],
)
def test_options_that_mean_nothing_are_refused_and_nothing_is_enabled(pipe, quantised, options, error, words):
    before = [sweep.snapshot(pipe.unet), type(pipe.scheduler)]
    with pytest.raises(error, match=words):
        ffpa_hf.enable(pipe, **options)
    assert [sweep.snapshot(pipe.unet), type(pipe.scheduler)] == before


def test_skip_first_steps_needs_a_scheduler(pipe, quantised):
    with pytest.raises(ValueError, match="scheduler"):
        ffpa_hf.enable(pipe.unet, precision="fp8", skip_first_steps=1)


def test_an_exception_halfway_gives_the_scheduler_back(pipe, quantised, monkeypatch):
    kind = type(pipe.scheduler)

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(capture, "enable", broken)
    with pytest.raises(KeyboardInterrupt):
        ffpa_hf.enable(pipe, precision="fp8", skip_first_steps=1)
    assert type(pipe.scheduler) is kind


def test_auto_without_kernels_says_so_and_changes_nothing(pipe, caplog, monkeypatch):
    monkeypatch.setattr(precision, "BUILT", frozenset())
    with caplog.at_level("WARNING", logger="ffpa_hf"):
        ffpa_hf.enable(pipe, precision="auto", skip_first_steps=1)
    assert "not built yet" in caplog.text
    plain = tiny_pipeline.generate(pipe)
    ffpa_hf.disable(pipe)
    assert (tiny_pipeline.generate(pipe) - plain).abs().max() <= TOLERANCE


@pytest.fixture
def hopper(monkeypatch) -> None:
    """Pretend that the machine has an H200. Only names are asked of it; tensors stay on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")


def test_fp8_waits_for_its_self_test(hopper, monkeypatch, caplog, tmp_path):
    with settings.override(allow_unqualified=False, cache_dir=str(tmp_path)):
        qualification.forget()
        monkeypatch.setattr(qualification, "_SHIPPED", tmp_path / "none.json")
        (tmp_path / "none.json").write_text("{}")
        words = "not qualified here: compiled, .*`ffpa-hf selftest --backend cuda-fp8`"
        with pytest.raises(RuntimeError, match=words):
            precision.check("fp8", None, None)
        with caplog.at_level("WARNING", logger="ffpa_hf"):
            precision.check("auto", None, None)
        assert re.search(f"{words}.*the input's own dtype is used", caplog.text)
        assert precision.quantised_route("auto", Route()) == Route()
        qualification.keep("cuda-fp8", (9, 0), False, "NVIDIA H200", cases=9, failed=0, date="2026-12-01T00:00:00")
        precision.check("fp8", None, None)
        assert precision.quantised_route("auto", Route()).for_length(precision.LONG).forward_backend.enable_fp8
    qualification.forget()


def test_fp8_on_other_gpus_is_not_refused_for_want_of_a_self_test(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with settings.override(allow_unqualified=False):
        precision.check("fp8", None, None)  # each call then falls back, and says why


# --- fused projections ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flux", "wan", "cogvideox", "unet_sdxl", "vae_kl", "pixart"])
def test_enable_fuses_and_disable_parts(name, monkeypatch):
    model, inputs = tiny.make(name)
    expected, keys, before, words = (
        sweep.run(model, inputs),
        list(model.state_dict()),
        sweep.snapshot(model),
        set(vars(model)),
    )
    ffpa_hf.enable(model, fuse_qkv=True)
    assert any("to_qkv." in key or "to_kv." in key for key in model.state_dict())
    with tiny.counted(monkeypatch) as calls:
        assert (sweep.run(model, inputs) - expected).abs().max() <= TOLERANCE
    assert calls
    ffpa_hf.disable(model)
    assert list(model.state_dict()) == keys and sweep.snapshot(model) == before and set(vars(model)) == words
    assert torch.equal(sweep.run(model, inputs), expected)


def test_what_the_user_fused_stays_fused():
    model, inputs = tiny.make("flux")
    model.fuse_qkv_projections()
    keys, before = list(model.state_dict()), sweep.snapshot(model)
    with ffpa_hf.enabled(model, fuse_qkv=True):
        pass
    assert list(model.state_dict()) == keys and sweep.snapshot(model) == before


def test_fusing_under_a_processor_of_ours_gives_that_back():
    model, inputs = tiny.make("unet_sdxl")
    plain = sweep.snapshot(model)
    expected = sweep.run(model, inputs)
    mine = FFPAAttnProcessor("sdpa")
    model.set_attn_processor(mine)
    before = sweep.snapshot(model)
    with ffpa_hf.enabled(model, fuse_qkv=True):
        assert (sweep.run(model, inputs) - expected).abs().max() <= TOLERANCE
    assert sweep.snapshot(model) == before
    assert (sweep.run(model, inputs) - expected).abs().max() <= TOLERANCE
    ffpa_hf.disable(model)
    assert sweep.snapshot(model) == plain


@pytest.mark.parametrize("name", ["sd3", "unet_added_kv"])
def test_models_that_diffusers_cannot_fuse_are_refused_and_left_alone(name):
    """SD3 with two attentions per block, and added KV projections."""
    model, inputs = tiny.make(name)
    before, keys, words = sweep.snapshot(model), list(model.state_dict()), set(vars(model))
    with pytest.raises(ValueError, match="cannot fuse"):
        ffpa_hf.enable(model, fuse_qkv=True)
    assert sweep.snapshot(model) == before and list(model.state_dict()) == keys and set(vars(model)) == words


def lora(**more: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False, **more)


@pytest.mark.parametrize("name", ["flux", "unet_sdxl"])
def test_lora_and_fused_projections_exclude_each_other(name):
    """Fused weights do not know the adapter: in either order it would be without effect, silently."""
    model, inputs = tiny.make(name)
    expected = sweep.run(model, inputs)
    ffpa_hf.enable(model, fuse_qkv=True)
    with pytest.raises(ValueError, match="fused"):
        model.add_adapter(lora())
    assert (sweep.run(model, inputs) - expected).abs().max() <= TOLERANCE
    ffpa_hf.disable(model)

    model, inputs = tiny.make(name)
    model.add_adapter(lora())
    adapted = sweep.run(model, inputs)
    assert (adapted - expected).abs().max() > 1e-4
    with pytest.raises(ValueError, match="LoRA"):
        ffpa_hf.enable(model, fuse_qkv=True)
    ffpa_hf.enable(model)
    with pytest.raises(ValueError, match="LoRA"):
        model.fuse_qkv_projections()
    assert (sweep.run(model, inputs) - adapted).abs().max() <= TOLERANCE


def test_cast_storage_is_not_fused():
    model, _ = tiny.make("flux")
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    with pytest.raises(ValueError, match="float8"):
        ffpa_hf.enable(model, fuse_qkv=True)


def test_an_ip_adapter_is_not_fused_away():
    """diffusers would replace the processors, and with them the adapter's weights."""
    from diffusers.models import attention_processor as legacy

    model, _ = tiny.make("unet_sdxl")
    adapted = {}
    for name, processor in model.attn_processors.items():
        module = model.get_submodule(name.removesuffix(".processor"))
        adapted[name] = (
            legacy.IPAdapterAttnProcessor2_0(module.to_q.in_features, module.cross_attention_dim, num_tokens=(4,))
            if name.endswith("attn2.processor")
            else processor
        )
    model.set_attn_processor(adapted)
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match="holds weights"):
        ffpa_hf.enable(model, fuse_qkv=True)
    ffpa_hf.enable(model)
    with pytest.raises(ValueError, match="holds weights"):
        model.fuse_qkv_projections()
    assert [key for key in model.state_dict() if "processor" in key] == [key for key in keys if "processor" in key]


# --- nesting ----------------------------------------------------------------------------------------------------------


def test_nested_blocks_give_each_other_back(pipe):
    before = [sweep.snapshot(pipe.unet), sweep.snapshot(pipe.vae)]
    keys = list(pipe.unet.state_dict())

    def routes() -> set[Any]:
        return {processor.route.backend for processor in pipe.unet.attn_processors.values()}

    with ffpa_hf.enabled(pipe, backend="triton", vae=False):
        with pytest.raises(ZeroDivisionError), ffpa_hf.enabled(pipe, backend="sdpa", fuse_qkv=True):
            assert routes() == {ffpa_hf.SDPABackend()}
            raise ZeroDivisionError
        assert routes() == {TritonBackend()} and list(pipe.unet.state_dict()) == keys
        assert sweep.snapshot(pipe.vae) == before[1]
    assert [sweep.snapshot(pipe.unet), sweep.snapshot(pipe.vae)] == before


def test_a_refused_inner_block_leaves_the_outer_one(pipe):
    with ffpa_hf.enabled(pipe, backend="triton"):
        with pytest.raises(TypeError), ffpa_hf.enabled(pipe, speed=2):
            pass
        routes = {processor.route.backend for processor in pipe.unet.attn_processors.values()}
        assert routes == {TritonBackend()}


# --- report -----------------------------------------------------------------------------------------------------------


def test_the_report_speaks_of_every_attention_module_before_and_after_a_call(pipe):
    def states() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for row in ffpa_hf.report(pipe).uncalled:
            found.setdefault(row.module_name.split(".")[0], set()).add(row.reason)
        return found

    modules = sum(capture.holds_processor(m) for part in (pipe.unet, pipe.vae) for m in part.modules())
    assert len(ffpa_hf.report(pipe).uncalled) == modules
    assert states() == {
        "unet": {"not accelerated: AttnProcessor2_0 was not replaced"},
        "vae": {"not accelerated: AttnProcessor2_0 was not replaced"},
    }
    ffpa_hf.enable(pipe, vae=False)
    assert states() == {
        "unet": {"accelerated (native), not called yet"},
        "vae": {"not accelerated: AttnProcessor2_0 was not replaced"},
    }
    assert "(native), not called yet: " in str(ffpa_hf.report(pipe))
    tiny_pipeline.generate(pipe)
    assert set(states()) == {"vae"}
    assert "was not replaced: 2 modules, from vae." in str(ffpa_hf.report(pipe))


def test_the_report_names_inline_attention_and_diffusers_own_switch():
    model, _ = tiny.make("vae_wan")
    assert {row.reason for row in ffpa_hf.report(model).uncalled} == {"not accelerated: attention inside forward"}
    ffpa_hf.enable(model)
    assert {row.reason for row in ffpa_hf.report(model).uncalled} == {"accelerated (inline), not called yet"}
    model, _ = tiny.make("flux")
    model.transformer_blocks[0].attn.set_attention_backend("ffpa")
    reasons = [row.reason for row in ffpa_hf.report(model).uncalled]
    assert "set_attention_backend" in reasons[0] and "was not replaced" in reasons[1]
