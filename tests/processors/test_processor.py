"""One shared FFPAAttnProcessor on tiny diffusers models: the default processors' numbers, through `attend` alone."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("diffusers")

import diffusers  # noqa: E402
import diffusers_models as tiny  # noqa: E402
from diffusers.models import attention_processor as legacy  # noqa: E402

import ffpa_hf  # noqa: E402
from ffpa_hf import FFPAAttnProcessor, settings  # noqa: E402
from ffpa_hf.processors import capture  # noqa: E402

TOLERANCE = 1e-5


def processors(model: Any) -> list[Any]:
    return [module.processor for module in model.modules() if capture.holds_processor(module)]


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*tiny.PROMISED, *tiny.MORE])
def test_shared_processor_gives_the_default_numbers(name, monkeypatch):
    model, inputs = tiny.make(name)
    shared = FFPAAttnProcessor()
    with torch.no_grad():
        with tiny.AttentionOps() as before:
            expected = tiny.run(model, inputs)
        model.set_attn_processor(shared)
        with tiny.counted(monkeypatch) as calls, tiny.AttentionOps() as after:
            result = tiny.run(model, inputs)
    assert (result - expected).abs().max() <= TOLERANCE
    assert before.count == after.count
    inline = 1 if name == "mochi" else 0  # its pooling of text tokens is written inline: `enable` reaches it
    assert len(calls) == before.count - inline > 0
    assert {call["site"] for call in calls} <= set(model.modules())
    assert all(call["route"] is shared.route for call in calls)
    untouched = [p for p in processors(model) if p is not shared]
    assert {type(p).__name__ for p in untouched} <= {"SanaLinearAttnProcessor2_0"}


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen_image", "wan", "unet_sdxl", "vae_kl"])
def test_gradients_are_the_default_gradients(name):
    model, inputs = tiny.make(name)
    model.train()
    gradients = []
    for processor in (None, FFPAAttnProcessor()):
        if processor is not None:
            model.set_attn_processor(processor)
        model.zero_grad()
        tiny.run(model, inputs).square().sum().backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    expected, result = gradients
    assert expected.keys() == result.keys() and len(expected) > 10
    for key, gradient in expected.items():
        assert (result[key] - gradient).abs().max() <= TOLERANCE * max(1.0, gradient.abs().max().item()), key


@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
def test_gradient_checkpointing_recomputes_the_same(name, monkeypatch):
    model, inputs = tiny.make(name)
    model.train()
    model.set_attn_processor(FFPAAttnProcessor())
    tiny.run(model, inputs).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.enable_gradient_checkpointing()
    with tiny.counted(monkeypatch) as calls:
        out = tiny.run(model, inputs).square().sum()
        once = len(calls)
        out.backward()
    assert len(calls) == 2 * once
    result = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(
        (a - b).abs().max() <= TOLERANCE * max(1, a.abs().max().item()) for a, b in zip(expected, result, strict=True)
    )


@pytest.mark.parametrize("name", ["flux", "unet_sdxl", "vae_kl"])
def test_bf16_is_as_close_as_the_default(name):
    model, inputs = tiny.make(name)
    with torch.no_grad():
        truth = tiny.run(model, inputs)
        model.to(torch.bfloat16)
        half = {
            key: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in inputs.items()
        }
        if "added_cond_kwargs" in half:
            half["added_cond_kwargs"] = {key: value.bfloat16() for key, value in half["added_cond_kwargs"].items()}
        default = (tiny.run(model, half).float() - truth).abs().max()
        model.set_attn_processor(FFPAAttnProcessor())
        ours = (tiny.run(model, half).float() - truth).abs().max()
    assert ours <= 1.1 * default + 1e-3


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("chroma", "attention_mask"),
        ("qwen_image", "encoder_hidden_states_mask"),
        ("hunyuan_video", "encoder_attention_mask"),
        ("ltx", "encoder_attention_mask"),
        ("pixart", "encoder_attention_mask"),
        ("unet_sdxl", "encoder_attention_mask"),
        ("unet_added_kv", "encoder_attention_mask"),
        ("cosmos", "attention_mask"),
    ],
)
def test_masks_reach_attention(name, argument, monkeypatch):
    model, inputs = tiny.make(name)
    model.set_attn_processor(FFPAAttnProcessor())
    with torch.no_grad(), tiny.counted(monkeypatch) as calls:
        masked = tiny.run(model, inputs)
        seen = [call["attn_mask"] for call in calls if call["attn_mask"] is not None]
        everything = tiny.run(model, {**inputs, argument: torch.ones_like(inputs[argument])})
    assert seen, "no call carried the mask"
    assert (masked - everything).abs().max() > 1e-4, "the mask changed nothing"
    if name not in ("chroma", "hunyuan_video"):  # these build N x N masks themselves
        assert all(mask.shape[-2] == 1 or mask.stride(-2) == 0 for mask in seen), "a key mask became N x N"


def test_a_two_dimensional_mask_is_a_key_mask():
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    query, key, value = (torch.randn(3, length, 2, 8) for length in (5, 7, 7))
    mask = torch.rand(3, 7) > 0.4
    mask[:, 0] = True
    expected = dispatch_attention_fn(query, key, value, attn_mask=mask, backend="native")
    result = dispatch_attention_fn(query, key, value, attn_mask=mask, backend="ffpa")
    assert (result - expected).abs().max() <= TOLERANCE
    unmasked = dispatch_attention_fn(query, key, value, backend="ffpa")
    assert (result - unmasked).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["flux", "wan", "sd3", "cogvideox", "unet_sdxl", "unet_added_kv", "vae_kl", "mochi"])
def test_no_function_mode_slows_eager_down(name, monkeypatch):
    """A mode sees every torch call of a processor; outside torch.compile the common ones need none."""
    model, inputs = tiny.make(name)
    model.set_attn_processor(FFPAAttnProcessor())

    def no_mode(*_: Any) -> Any:
        raise AssertionError("a function mode was entered")

    monkeypatch.setattr("ffpa_hf.processors.capture.Redirect", no_mode)
    monkeypatch.setattr("ffpa_hf.processors.generic.Redirect", no_mode)
    with torch.no_grad(), tiny.counted(monkeypatch) as calls:
        tiny.run(model, inputs)
    assert calls and all(call["site"] is not None for call in calls)


def test_views_reach_attention_and_the_output_keeps_their_layout(monkeypatch):
    model, inputs = tiny.make("flux")
    model.set_attn_processor(FFPAAttnProcessor())
    with torch.no_grad(), tiny.counted(monkeypatch) as calls:
        tiny.run(model, inputs)
    for call in calls:
        batch, heads, length, width = call["query"].shape
        assert call["query"].stride() == (heads * length * width, width, heads * width, 1)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_every_argument_of_every_diffusers_processor_is_named():
    """Attention.forward hands on only what the signature names; a new diffusers release may bring new names."""
    import importlib
    import pkgutil

    from ffpa_hf.processors.signature import _NAMES

    missing: dict[str, set[str]] = {}
    ours = set(_NAMES.split())
    package = importlib.import_module("diffusers.models")
    examined = 0
    for found in pkgutil.walk_packages(package.__path__, "diffusers.models."):
        try:
            module = importlib.import_module(found.name)
        except (ImportError, RuntimeError):  # needs a package that is not installed (flax)
            continue
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__ or "__call__" not in vars(kind):
                continue
            parameters = list(inspect.signature(kind.__call__).parameters.values())
            if "Proc" not in kind.__name__ or len(parameters) < 3 or parameters[1].name not in ("attn", "self_attn"):
                continue
            examined += 1
            named = {p.name for p in parameters[3:] if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
            if named - ours:
                missing[kind.__name__] = named - ours
    assert examined > 100
    assert missing == {}


def test_arguments_arrive_as_the_module_passed_them():
    class Recorder:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rope=None, temb=None):
            self.seen = (encoder_hidden_states, attention_mask, rope, temb)
            query = attn.to_q(hidden_states)[:, None]
            return F.scaled_dot_product_attention(query, query, query)[:, 0]

    attention, recorder = legacy.Attention(8, heads=1, dim_head=8), Recorder()
    attention.set_processor(recorder)
    hidden, text, rope = torch.randn(1, 3, 8), torch.randn(1, 2, 8), torch.randn(3)
    expected = attention(hidden, encoder_hidden_states=text, rope=rope, temb=None)
    attention.set_processor(FFPAAttnProcessor())
    result = attention(hidden, encoder_hidden_states=text, rope=rope, temb=None)
    assert torch.equal(result, expected)
    assert recorder.seen[0] is text and recorder.seen[1] is None and recorder.seen[2] is rope
    attention.processor(attention, hidden, text, None, rope)  # positional, as several models call it
    assert recorder.seen[0] is text and recorder.seen[2] is rope


def test_an_argument_that_only_a_custom_processor_names_arrives_too():
    class Custom:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, my_own_gain=1.0):
            query = attn.to_q(hidden_states)[:, None]
            return F.scaled_dot_product_attention(query, query, query)[:, 0] * my_own_gain

    module, hidden = legacy.Attention(8, heads=1, dim_head=8), torch.randn(1, 3, 8)
    module.set_processor(Custom())
    expected = module(hidden, my_own_gain=3.0)
    module.set_processor(FFPAAttnProcessor())
    assert torch.equal(module(hidden, my_own_gain=3.0), expected)
    assert not torch.equal(module(hidden), expected)


def test_asking_for_the_signature_is_cheap_and_right():
    """diffusers asks on every attention call; 60 parameters built anew cost more than a small attention."""
    processor = FFPAAttnProcessor()
    seen = inspect.signature(processor.__call__)
    assert seen is inspect.signature(processor.__call__)
    assert list(seen.parameters)[:2] == ["attn", "args"] and "image_rotary_emb" in seen.parameters
    assert list(inspect.signature(FFPAAttnProcessor.__call__).parameters)[0] == "self"


def test_an_argument_the_inner_processor_lacks_is_named_in_a_warning(caplog):
    attention = legacy.Attention(8, heads=1, dim_head=8)
    attention.set_processor(FFPAAttnProcessor())
    with caplog.at_level(logging.WARNING, logger="ffpa_hf"):
        attention(torch.randn(1, 3, 8), image_rotary_emb=torch.ones(1))
    assert "image_rotary_emb" in caplog.text and "AttnProcessor2_0" in caplog.text


# --- routes -----------------------------------------------------------------------------------------------------------


def test_constructor_takes_nothing_or_backends():
    assert FFPAAttnProcessor().route == FFPAAttnProcessor(backend="auto").route
    assert repr(FFPAAttnProcessor("triton", strict=True)).startswith("FFPAAttnProcessor(backend=TritonBackend(")
    with pytest.raises(ValueError, match="names no backend"):
        FFPAAttnProcessor("fast")


def test_a_strict_backend_is_an_explicit_request():
    model, inputs = tiny.make("flux")
    model.set_attn_processor(FFPAAttnProcessor("cuda-fp8", strict=True))
    with torch.no_grad(), pytest.raises((TypeError, NotImplementedError, RuntimeError, ValueError)):
        tiny.run(model, inputs)
    model.set_attn_processor(FFPAAttnProcessor("cuda-fp8"))
    with torch.no_grad():
        tiny.run(model, inputs)
    assert ffpa_hf.report(model).backends() == {"sdpa": 2}


@pytest.mark.parametrize("build", ["backend", "mode"])
def test_triton_runs_inside_a_model(build, forced, device):
    """The kernel itself, through the dispatcher (Flux) and through the function mode (AutoencoderKL, head dim 64)."""
    if build == "backend":
        model = diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=0,
            attention_head_dim=64,
            num_attention_heads=1,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=[16, 16, 32],
        )
        _, inputs = tiny.flux()
        inputs["encoder_hidden_states"] = torch.randn(2, 8, 16)
        inputs["pooled_projections"] = torch.randn(2, 16)
    else:
        model = diffusers.AutoencoderKL(
            block_out_channels=[64],
            down_block_types=["DownEncoderBlock2D"],
            up_block_types=["UpDecoderBlock2D"],
            norm_num_groups=8,
        )
        inputs = {"sample": torch.randn(1, 3, 6, 6)}
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = model.to(device, dtype).eval()
    inputs = {key: value.to(device, dtype if value.is_floating_point() else None) for key, value in inputs.items()}
    with torch.no_grad():
        with settings.override(force_no_sdpa_fallback=False):
            expected = tiny.run(model, inputs)
        model.set_attn_processor(FFPAAttnProcessor("triton", strict=True))
        result = tiny.run(model, inputs)
    assert set(ffpa_hf.report(model).backends()) == {"triton"}
    assert (result - expected).abs().max() <= (1e-4 if dtype == torch.float32 else 2e-2)


# --- state ------------------------------------------------------------------------------------------------------------


def test_one_instance_serves_several_models_and_holds_nothing_of_them():
    shared = FFPAAttnProcessor()
    results = []
    for name in ("flux", "sd3", "vae_kl"):
        model, inputs = tiny.make(name)
        with torch.no_grad():
            expected = tiny.run(model, inputs)
            model.set_attn_processor(shared)
            results.append((model, inputs, expected))
    for model, inputs, expected in results:
        with torch.no_grad():
            assert (tiny.run(model, inputs) - expected).abs().max() <= TOLERANCE
    assert set(vars(shared)) == {"route"}


def test_setting_it_twice_or_another_instance_keeps_the_remembered_processor():
    model, _ = tiny.make("flux")
    attention = model.transformer_blocks[0].attn
    original = attention.processor
    first, second = FFPAAttnProcessor(), FFPAAttnProcessor("sdpa")
    for processor in (first, first, second):
        model.set_attn_processor(processor)
        assert attention.processor is processor
        assert capture.slot_of(attention).inner is original
    ffpa_hf.disable(model)
    assert attention.processor is original and capture.slot_of(attention) is None


def test_a_processor_set_by_the_user_afterwards_wins():
    model, _ = tiny.make("unet_sdxl")
    model.set_attn_processor(FFPAAttnProcessor())
    mine = legacy.AttnProcessor2_0()
    model.set_attn_processor(mine)
    assert all(processor is mine for processor in processors(model))
    assert not any(capture.slot_of(module) for module in model.modules())
    ffpa_hf.disable(model)
    assert all(processor is mine for processor in processors(model))


def test_a_module_built_with_it_uses_its_declared_default_or_says_what_to_do():
    from diffusers.models.transformers.transformer_flux import FluxAttention

    torch.manual_seed(0)
    hidden = torch.randn(1, 5, 16)
    plain = FluxAttention(16, heads=2, dim_head=8)
    built = FluxAttention(16, heads=2, dim_head=8, processor=FFPAAttnProcessor())
    built.load_state_dict(plain.state_dict())
    assert torch.equal(built(hidden), plain(hidden))
    old = legacy.Attention(8, heads=1, dim_head=8, processor=FFPAAttnProcessor())
    with pytest.raises(RuntimeError, match="never had another processor"):
        old(torch.randn(1, 3, 8))


@pytest.mark.parametrize("name", ["flux", "unet_sdxl", "vae_wan"])
def test_state_dict_and_copies(name, tmp_path):
    model, inputs = tiny.make(name)
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = tiny.run(model, inputs)
    ffpa_hf.enable(model)
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    owners = {id(module.processor) for module in twin.modules() if capture.holds_processor(module)}
    assert len(owners) <= 1
    assert owners.isdisjoint(id(processor) for processor in processors(model))
    torch.save(model, tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    model.save_pretrained(tmp_path / "saved")
    reloaded = type(model).from_pretrained(tmp_path / "saved").eval()
    assert not any(isinstance(processor, FFPAAttnProcessor) for processor in processors(reloaded))
    for other in (twin, loaded):
        assert list(other.state_dict()) == keys
        with torch.no_grad():
            assert (tiny.run(other, inputs) - expected).abs().max() <= TOLERANCE
        assert len(ffpa_hf.report(other).rows) > 0, "the copy is not accelerated"
        ffpa_hf.disable(other)
        assert not any(capture.slot_of(module) for module in other.modules())
        with torch.no_grad():
            assert (tiny.run(other, inputs) - expected).abs().max() <= TOLERANCE
    with torch.no_grad():
        assert (tiny.run(reloaded, inputs) - expected).abs().max() <= TOLERANCE


def test_it_pickles_by_itself():
    assert pickle.loads(pickle.dumps(FFPAAttnProcessor("triton"))).route == FFPAAttnProcessor("triton").route


# --- diffusers' other setters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flux", "wan", "cogvideox", "unet_sdxl", "vae_kl"])
@pytest.mark.parametrize("order", ["fuse first", "fuse last", "fuse and unfuse"])
def test_fused_projections_in_either_order(name, order, monkeypatch):
    model, inputs = tiny.make(name)
    with torch.no_grad():
        expected = tiny.run(model, inputs)
    before = processors(model)
    shared = FFPAAttnProcessor()
    if order == "fuse first":
        model.fuse_qkv_projections()
        before = processors(model)
        model.set_attn_processor(shared)
    else:
        model.set_attn_processor(shared)
        model.fuse_qkv_projections()
        if order == "fuse and unfuse":
            model.unfuse_qkv_projections()
    with torch.no_grad(), tiny.counted(monkeypatch) as calls:
        result = tiny.run(model, inputs)
    assert (result - expected).abs().max() <= TOLERANCE
    assert calls and all(processor is shared for processor in processors(model))
    ffpa_hf.disable(model)
    if order != "fuse last":
        assert all(a is b for a, b in zip(processors(model), before, strict=True))
    with torch.no_grad():
        assert (tiny.run(model, inputs) - expected).abs().max() <= TOLERANCE


def test_fusing_a_model_with_added_kv_projections_is_refused_as_by_default():
    model, _ = tiny.make("unet_added_kv")
    with pytest.raises(ValueError, match="added KV"):
        model.fuse_qkv_projections()
    model.set_attn_processor(FFPAAttnProcessor())
    with pytest.raises(ValueError, match="added KV"):
        model.fuse_qkv_projections()


@pytest.mark.parametrize("name", ["unet_sdxl", "unet_added_kv"])
@pytest.mark.parametrize("kind", ["manual", "sliced"])
def test_processors_that_write_softmax_out_are_accelerated_too(name, kind, monkeypatch):
    model, inputs = tiny.make(name)
    if kind == "sliced":
        model.set_attention_slice(1)
    elif name == "unet_sdxl":
        model.set_attn_processor(legacy.AttnProcessor())
    else:
        model.set_attn_processor(legacy.AttnAddedKVProcessor())
    before = processors(model)
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        model.set_attn_processor(FFPAAttnProcessor())
        with tiny.counted(monkeypatch) as calls:
            result = tiny.run(model, inputs)
    assert (result - expected).abs().max() <= TOLERANCE
    assert len(calls) == len(before)
    ffpa_hf.disable(model)
    assert all(a is b for a, b in zip(processors(model), before, strict=True))


def test_unscaled_attention_keeps_its_scale_of_one(monkeypatch):
    attention = legacy.Attention(16, heads=2, dim_head=8, scale_qk=False)
    hidden = torch.randn(2, 5, 16)
    expected = attention(hidden)
    attention.set_processor(FFPAAttnProcessor())
    with tiny.counted(monkeypatch) as calls:
        result = attention(hidden)
    assert [call["scale"] for call in calls] == [1.0]
    assert (result - expected).abs().max() <= TOLERANCE


def test_attention_slicing_leaves_it_in_place(monkeypatch):
    model, inputs = tiny.make("unet_sdxl")
    with torch.no_grad():
        expected = tiny.run(model, inputs)
    shared = FFPAAttnProcessor()
    model.set_attn_processor(shared)
    for size in ("auto", None):
        if size is None:
            for module in model.modules():
                if isinstance(module, legacy.Attention):
                    module.set_attention_slice(None)
        else:
            model.set_attention_slice(size)
        with torch.no_grad(), tiny.counted(monkeypatch) as calls:
            result = tiny.run(model, inputs)
        assert (result - expected).abs().max() <= TOLERANCE
        assert len(calls) == 16 and all(processor is shared for processor in processors(model))


def test_pag_comes_and_goes():
    model, inputs = tiny.make("unet_sdxl")
    before = processors(model)
    with torch.no_grad():
        expected = tiny.run(model, inputs)
    model.set_attn_processor(FFPAAttnProcessor())
    saved = model.attn_processors
    attention = model.mid_block.attentions[0].transformer_blocks[0].attn1
    attention.processor = legacy.PAGIdentitySelfAttnProcessor2_0()  # what its pipelines do
    model.set_attn_processor(dict(saved))
    with torch.no_grad():
        assert (tiny.run(model, inputs) - expected).abs().max() <= TOLERANCE
    ffpa_hf.disable(model)
    assert all(a is b for a, b in zip(processors(model), before, strict=True))


def ip_adapter(attention: Any, kind: str = "IPAdapterAttnProcessor2_0") -> Any:
    return getattr(legacy, kind)(
        hidden_size=attention.to_q.in_features, cross_attention_dim=attention.cross_attention_dim, num_tokens=(4,)
    )


@pytest.mark.parametrize("kind", ["IPAdapterAttnProcessor2_0", "IPAdapterAttnProcessor"])
@pytest.mark.parametrize("order", ["adapter first", "adapter last"])
def test_ip_adapter_keeps_its_weights_and_is_accelerated(kind, order, monkeypatch):
    torch.manual_seed(0)
    attention = legacy.Attention(16, cross_attention_dim=12, heads=2, dim_head=8)
    hidden, text, image = torch.randn(2, 5, 16), torch.randn(2, 7, 12), [torch.randn(2, 1, 4, 12)]
    adapter = ip_adapter(attention, kind)
    plain = copy.deepcopy(attention)
    plain.set_processor(copy.deepcopy(adapter))
    keys = list(plain.state_dict())
    expected = plain(hidden, encoder_hidden_states=(text, image))

    shared = FFPAAttnProcessor()
    steps = [adapter, shared] if order == "adapter first" else [shared, adapter]
    for step in steps:
        attention.set_processor(step)
    with tiny.counted(monkeypatch) as calls:
        result = attention(hidden, encoder_hidden_states=(text, image))
    assert (result - expected).abs().max() <= TOLERANCE
    assert len(calls) == 2 and all(call["route"] is shared.route for call in calls)
    assert list(attention.state_dict()) == keys
    assert attention.processor is adapter and isinstance(adapter, getattr(legacy, kind))

    for twin in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        with tiny.counted(monkeypatch) as calls:
            assert (twin(hidden, encoder_hidden_states=(text, image)) - expected).abs().max() <= TOLERANCE
        assert len(calls) == 2 and twin.processor is not adapter

    capture.uninstall(attention)
    assert attention.processor is adapter and type(adapter) is getattr(legacy, kind)
    with tiny.counted(monkeypatch) as calls:
        attention(hidden, encoder_hidden_states=(text, image))
    assert calls == []


@pytest.mark.parametrize("name", ["pixart", "qwen_image"])  # the function mode, the dispatcher
def test_layer_skipping_still_skips(name, monkeypatch):
    """diffusers skips attention scores with a TorchFunctionMode on F.sdpa, which sees no kernel of ours."""
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    skip = LayerSkipConfig([0], fqn="auto", skip_attention=False, skip_attention_scores=True, skip_ff=False)
    outputs, calls = {}, []
    for accelerated in (False, True):
        for skipping in (False, True):
            model, inputs = tiny.make(name)
            if accelerated:
                model.set_attn_processor(FFPAAttnProcessor())
            if skipping:
                apply_layer_skip(model, skip)
            with torch.no_grad(), tiny.counted(monkeypatch) as seen:
                outputs[accelerated, skipping] = tiny.run(model, inputs)
            calls.append(len(seen))
    assert (outputs[False, True] - outputs[False, False]).abs().max() > 1e-3
    assert (outputs[True, True] - outputs[False, True]).abs().max() <= TOLERANCE
    assert calls[3] == calls[2] - 1, "the skipped attention went to a kernel that the skipping mode cannot see"


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("flux", "aot_eager"),
        ("sd3", "aot_eager"),
        ("wan", "aot_eager"),
        ("qwen_image", "aot_eager"),
        ("unet_sdxl", "eager"),
        ("unet_gligen", "eager"),
        ("vae_kl", "eager"),  # aot_eager fails on this model with its own processors too (a torch CPU layout check)
        ("vae_wan", "eager"),
        ("cosmos", "eager"),
    ],
)
def test_compiles_in_one_graph(name, backend):
    model, inputs = tiny.make(name)
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        ffpa_hf.enable(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        result = tiny.run(compiled, inputs)
    assert (result - expected).abs().max() <= TOLERANCE


def test_lengths_that_depend_on_data_stay_in_one_graph():
    """The HunyuanVideo family cuts text to the longest real prompt; no rule about such lengths can be decided."""

    class Cutting:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
            key = torch.cat([key, key[:, attention_mask]], dim=1)
            value = torch.cat([value, value[:, attention_mask.clone()]], dim=1)
            return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]

    module = legacy.Attention(8, heads=1, dim_head=8)
    module.set_processor(Cutting())
    hidden, real = torch.randn(1, 9, 8), torch.arange(9) < 5
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        expected = module(hidden, attention_mask=real)
        module.set_processor(FFPAAttnProcessor())
        torch._dynamo.reset()
        result = torch.compile(module, backend="eager", fullgraph=True)(hidden, attention_mask=real)
    assert (result - expected).abs().max() <= TOLERANCE


def test_repeated_blocks_share_their_graph():
    counts = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=4,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        ).eval()
        _, inputs = tiny.wan()
        if accelerated:
            model.set_attn_processor(FFPAAttnProcessor())
        torch._dynamo.reset()
        graphs: list[Any] = []

        def backend(module: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(module)
            return module.forward

        model.compile_repeated_blocks(backend=backend, fullgraph=True)
        with torch.no_grad():
            tiny.run(model, inputs)
        counts.append(len(graphs))
    assert counts[0] == counts[1] > 0


GAIN = 1.0


class _Gained:
    """A custom processor that reads a global of its module."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None):
        query, key, value = (
            part(hidden_states).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for part in (attn.to_q, attn.to_k, attn.to_v)
        )
        out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return attn.to_out[0](out) * GAIN


def test_a_processor_sees_the_globals_of_the_moment(monkeypatch):
    from diffusers.models.attention_processor import Attention

    attn = Attention(query_dim=16, heads=2, dim_head=8, processor=_Gained())
    attn.set_processor(FFPAAttnProcessor())
    hidden = torch.randn(1, 5, 16)
    assert attn(hidden).abs().max() > 0
    monkeypatch.setitem(globals(), "GAIN", 0.0)
    assert attn(hidden).abs().max() == 0
