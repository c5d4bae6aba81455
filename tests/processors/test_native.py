"""Native processors: the default numbers with fewer copies, and a way back for whatever they do not know."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers  # noqa: E402
import diffusers_models as tiny  # noqa: E402
from diffusers.models import attention_processor as legacy  # noqa: E402
from diffusers.models.transformers import transformer_flux  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import ffpa_hf  # noqa: E402
from ffpa_hf import FFPAAttnProcessor, RowIntervals  # noqa: E402
from ffpa_hf.processors import capture, generic, native, projections, redirect  # noqa: E402

TOLERANCE = 1e-5


def flux_wide() -> tuple[Any, dict[str, Any]]:
    """One sample, as pipelines have it: values are projected into place."""
    model, inputs = tiny.flux()
    narrow = {name: value[:1] for name, value in inputs.items() if not name.endswith("_ids")}
    return model, {**inputs, **narrow}


def wan_image() -> tuple[Any, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=1, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32, image_dim=8, added_kv_proj_dim=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(2, 512, 16),
        "encoder_hidden_states_image": torch.randn(2, 5, 8),
        "timestep": torch.tensor([7, 9]),
    }
    return model, inputs


def hunyuan_video15() -> tuple[Any, dict[str, Any]]:
    model = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=16, text_embed_2_dim=8, image_embed_dim=12,
        rope_axes_dim=(4, 6, 6), target_size=16, task_type="t2v",
    )  # fmt: skip
    mask, mask_2 = torch.ones(2, 6), torch.ones(2, 5)
    mask[1, 4:] = 0
    mask_2[0, 2:] = 0
    inputs = {
        "hidden_states": torch.randn(2, 4, 1, 4, 4),
        "timestep": torch.tensor([3.0, 4.0]),
        "encoder_hidden_states": torch.randn(2, 6, 16),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": torch.randn(2, 5, 8),
        "encoder_attention_mask_2": mask_2,
        "image_embeds": torch.zeros(2, 3, 12),
    }
    return model, inputs


OWN = {"flux_wide": flux_wide, "wan_image": wan_image, "hunyuan_video15": hunyuan_video15}
#: model -> how many of its attentions run natively in one forward.
MODELS = {
    "flux": 2, "flux_wide": 2, "flux2": 2, "chroma": 2, "qwen_image": 2, "wan": 4, "wan_image": 2, "sd3": 3,
    "hunyuan_video": 3, "hunyuan_video15": 2, "unet_sdxl": 16, "vae_kl": 2, "controlnet_flux": 2,
    "vae_hunyuan_video": 2,
}  # fmt: skip


def make(name: str) -> tuple[Any, dict[str, Any]]:
    if name not in OWN:
        return tiny.make(name)
    torch.manual_seed(0)
    model, inputs = OWN[name]()
    return model.eval(), inputs


@pytest.fixture(autouse=True)
def pays(monkeypatch) -> Any:
    """As where the kernel runs; on the CPU, and with a gradient, torch then does its part. Gives the real answer."""
    real = native.pays
    monkeypatch.setattr(native, "pays", lambda attn, x: True)
    return real


@pytest.fixture
def served(monkeypatch) -> Iterator[SimpleNamespace]:
    """Counts calls: answered natively, sent on, and all of them as attention sees them."""
    seen = SimpleNamespace(native=0, generic=0, attention=[])
    run, attend = FFPAAttnProcessor._run, redirect.attend

    def counted_run(self: Any, slot: Any, attn: Any, *rest: Any) -> Any:
        seen.generic += 1
        return run(self, slot, attn, *rest)

    def counted_attend(query: Any, key: Any, value: Any, **more: Any) -> Any:
        seen.attention.append({"query": query, "key": key, "value": value, **more})
        return attend(query, key, value, **more)

    call = FFPAAttnProcessor.__call__

    def counted_call(self: Any, attn: Any, *args: Any, **kwargs: Any) -> Any:
        before = seen.generic
        out = call(self, attn, *args, **kwargs)
        seen.native += seen.generic == before
        return out

    counted_call.__signature__ = call.__signature__  # type: ignore[attr-defined]
    monkeypatch.setattr(FFPAAttnProcessor, "_run", counted_run)
    monkeypatch.setattr(FFPAAttnProcessor, "__call__", counted_call)
    monkeypatch.setattr(redirect, "attend", counted_attend)
    yield seen


@pytest.fixture
def kernel(monkeypatch) -> list[Any]:
    """The kernel serves whatever it can, without the attention kernels, which take no tiny head dim."""
    if torch.cuda.is_available():
        pytest.skip(
            "the interpreter is off beside a GPU; tests/gpu/test_native_processors.py has the kernel in real models"
        )
    from ffpa_hf import joint, ops

    calls: list[Any] = []
    serves, run = joint._kernel_serves, ops.join_streams

    def forced(streams: Any, factors: Any, across_heads: bool) -> bool:
        with ffpa_hf.settings.override(triton_interpret=True, force_no_sdpa_fallback=True):
            return serves(streams, factors, across_heads)

    monkeypatch.setattr(joint, "_kernel_serves", forced)
    monkeypatch.setattr(ops, "join_streams", lambda *values: calls.append(values) or run(*values))
    return calls


def both(name: str, change: Any = lambda model: None) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The default's result, ours, and the model."""
    model, inputs = make(name)
    change(model)
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        model.set_attn_processor(FFPAAttnProcessor())
        result = tiny.run(model, inputs)
    return expected, result, model


def close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.isfinite(result).all()) and (result - expected).abs().max().item() <= TOLERANCE


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_default_numbers(name, served):
    expected, result, _ = both(name)
    assert close(result, expected)
    assert served.native == MODELS[name] and served.generic == 0


@pytest.mark.parametrize("name", ["flux", "flux_wide", "flux2", "qwen_image", "wan_image", "sd3", "hunyuan_video15"])
def test_the_kernel_gives_the_default_numbers(name, kernel, served):
    expected, result, _ = both(name)
    assert close(result, expected) and served.native == MODELS[name]
    plain = 1 if name == "hunyuan_video15" else 0  # its refiner has neither norms nor positions
    assert len(kernel) >= 2 * (served.native - plain)


@pytest.mark.parametrize("name", ["flux", "flux2", "qwen_image", "wan_image", "hunyuan_video15", "vae_kl"])
def test_the_default_gradients(name, served):
    model, inputs = make(name)
    model.train()
    gradients = []
    for processor in (None, FFPAAttnProcessor()):
        if processor is not None:
            model.set_attn_processor(processor)
        model.zero_grad()
        tiny.run(model, inputs).square().sum().backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    expected, result = gradients
    assert served.native == MODELS[name] and expected.keys() == result.keys() and len(expected) > 10
    for key, gradient in expected.items():
        assert (result[key] - gradient).abs().max() <= TOLERANCE * max(1.0, gradient.abs().max().item()), key


@pytest.mark.parametrize("name", ["flux_wide", "qwen_image", "wan", "sd3"])
def test_bf16_is_no_further_from_the_truth_than_the_default(name, served):
    model, inputs = make(name)
    with torch.no_grad():
        truth = tiny.run(model, inputs)
        model.to(torch.bfloat16)
        half = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
        default = (tiny.run(model, half).float() - truth).norm()
        model.set_attn_processor(FFPAAttnProcessor())
        ours = (tiny.run(model, half).float() - truth).norm()
    assert served.native and ours <= 1.2 * default


def test_autocast(served):
    model, inputs = make("flux_wide")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = tiny.run(model, inputs)
        model.set_attn_processor(FFPAAttnProcessor())
        result = tiny.run(model, inputs)
    assert served.native == 2 and result.dtype == expected.dtype
    assert (result - expected).float().norm() <= 0.02 * expected.float().norm()


# --- what is copied ---------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Bytes of every storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in self._tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        fresh = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._tensors(out)}
        self.bytes += sum(size for pointer, size in fresh.items() if pointer not in known)
        return out

    def _tensors(self, value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, dict):
            value = list(value.values())
        return [t for item in value for t in self._tensors(item)] if isinstance(value, (list, tuple)) else []


def in_queries(attn: Any, tokens: int, *args: Any, **kwargs: Any) -> tuple[float, float]:
    """What the default and ours allocate for one call, in sizes of the query of all its tokens."""
    found = []
    for processor in (None, FFPAAttnProcessor()):
        if processor is not None:
            attn.set_processor(processor)
        with torch.no_grad(), Allocations() as allocations:
            attn(*args, **kwargs)
        found.append(allocations.bytes / (tokens * attn.inner_dim * 4))
    return found[0], found[1]


def test_joint_attention_allocates_what_it_must(kernel, monkeypatch):
    """Projections of q and k (2), the joint q, k and v (3), attention's output (1), the two output projections (1)."""
    monkeypatch.setattr(redirect, "attend", lambda query, key, value, **_: value.clone())
    attn = transformer_flux.FluxAttention(
        64, heads=4, dim_head=16, added_kv_proj_dim=64, out_dim=64, context_pre_only=False, bias=True
    )
    image, text = torch.randn(1, 48, 64), torch.randn(1, 16, 64)
    rotary = tuple(torch.randn(64, 16) for _ in range(2))
    default, ours = in_queries(attn, 64, image, text, image_rotary_emb=rotary)
    assert kernel and ours == 7 and default >= 2.5 * ours
    attn.fuse_projections()
    _, fused = in_queries(attn, 64, image, text, image_rotary_emb=rotary)
    assert fused == 7


def test_single_stream_attention_reads_its_fused_projection(kernel, monkeypatch, served):
    """One projection (3), normalised q and k (2), attention's output (1): v and the result are views."""
    monkeypatch.setattr(redirect, "attend", lambda query, key, value, **_: value.clone())
    attn = transformer_flux.FluxAttention(64, heads=4, dim_head=16, out_dim=64, pre_only=True, bias=True)
    attn.fuse_projections()
    rotary = tuple(torch.randn(64, 16) for _ in range(2))
    default, ours = in_queries(attn, 64, torch.randn(1, 64, 64), image_rotary_emb=rotary)
    assert kernel and ours == 6 and default >= 2 * ours


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["flux_wide", "flux2"])
def test_attention_gets_dense_queries_and_views_of_values(name, fused, served):
    _, inputs = make(name)
    model, _ = make(name)
    if fused:
        model.fuse_qkv_projections()
    model.set_attn_processor(FFPAAttnProcessor())
    with torch.no_grad():
        tiny.run(model, inputs)
    assert len(served.attention) == 2
    for call in served.attention:
        batch, heads, length, width = call["query"].shape
        dense = (heads * length * width, width, heads * width, 1)
        assert call["query"].stride() == call["key"].stride() == dense
    joint, single = (call["value"] for call in served.attention)
    assert joint.transpose(1, 2).is_contiguous()
    heads, width = single.shape[1], single.shape[3]
    assert single.stride(2) > heads * width if fused or name == "flux2" else single.transpose(1, 2).is_contiguous()


def test_an_autoencoder_makes_its_pixels_dense_once(monkeypatch):
    model, _ = make("vae_kl")
    attn = next(module for module in model.modules() if capture.holds_processor(module))
    monkeypatch.setattr(redirect, "attend", lambda query, key, value, **_: value.clone())
    x = torch.randn(1, attn.query_dim, 6, 6)
    default, ours = in_queries(attn, 36, x)
    assert ours <= default - 3


def test_the_result_has_the_memory_order_of_the_default(served):
    model, _ = make("vae_kl")
    attn = next(module for module in model.modules() if capture.holds_processor(module))
    x = torch.randn(2, attn.query_dim, 6, 5)
    with torch.no_grad():
        expected = attn(x)
        attn.set_processor(FFPAAttnProcessor())
        result = attn(x)
    assert result.stride() == expected.stride() and close(result, expected) and served.native == 1


# --- modules that do more than their class ----------------------------------------------------------------------------

LINEARS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")


@pytest.mark.parametrize("name", ["flux_wide", "qwen_image", "sd3", "wan", "unet_sdxl"])
def test_adapters_count(name, served):
    """LoRA replaces linear layers; its own weights would be missed where only `weight` was read."""
    peft = pytest.importorskip("peft")
    model, inputs = make(name)
    plain = tiny.run(model, inputs).detach()
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "add_v_proj"], init_lora_weights=False)
    adapted = peft.inject_adapter_in_model(config, model)
    with torch.no_grad():
        expected = tiny.run(adapted, inputs)
        model.set_attn_processor(FFPAAttnProcessor())
        result = tiny.run(adapted, inputs)
    assert close(result, expected) and served.native > 0
    assert (expected - plain).abs().max() > 1e-3, "the adapter does nothing here"


@pytest.mark.parametrize("linear", LINEARS)
def test_hooks_on_a_projection_run(linear, served):
    model, inputs = make("flux_wide")
    target = model.transformer_blocks[0].attn.get_submodule(linear)
    target.register_forward_hook(lambda module, args, out: out * 1.5)
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        model.set_attn_processor(FFPAAttnProcessor())
        result = tiny.run(model, inputs)
    assert close(result, expected) and served.native == 2


@pytest.mark.parametrize("norm", ["norm_q", "norm_added_k"])
@pytest.mark.parametrize("way", ["hook", "pre-hook", "forward", "class", "global hook", "weight"])
def test_a_norm_that_does_more_is_called(norm, way, served):
    model, inputs = make("flux_wide")
    target = getattr(model.transformer_blocks[0].attn, norm)
    handle = None
    if way == "hook":
        target.register_forward_hook(lambda module, args, out: out * 1.5)
    elif way == "pre-hook":
        target.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
    elif way == "forward":
        forward = target.forward
        target.forward = lambda x: forward(x) * 1.5
    elif way == "class":
        kind = type(target)
        target.__class__ = type("Louder", (kind,), {"forward": lambda self, x: kind.forward(self, x) * 1.5})
    elif way == "weight":
        target.weight = torch.nn.Parameter(target.weight.detach() * 1.5)
    else:
        hook = lambda module, args, out: out * 1.5 if module is target else None  # noqa: E731
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        plain, _, _ = both("flux_wide")
        with torch.no_grad():
            expected = tiny.run(model, inputs)
            model.set_attn_processor(FFPAAttnProcessor())
            result = tiny.run(model, inputs)
    finally:
        if handle is not None:
            handle.remove()
    assert close(result, expected) and (expected - plain).abs().max() > 1e-5


def test_weights_of_another_dtype_are_left_to_their_module(served):
    """Layerwise casting stores weights in one dtype and computes in another."""
    model, inputs = make("flux_wide")
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        model.set_attn_processor(FFPAAttnProcessor())
        result = tiny.run(model, inputs)
    assert close(result, expected) and served.native == 2


@pytest.mark.parametrize("name", ["flux", "flux_wide", "flux2", "wan_image", "unet_sdxl", "vae_kl"])
@pytest.mark.parametrize("first", ["fuse", "set"])
def test_fused_projections_in_either_order(name, first, served):
    model, inputs = make(name)
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        for step in (first, "set" if first == "fuse" else "fuse"):
            model.fuse_qkv_projections() if step == "fuse" else model.set_attn_processor(FFPAAttnProcessor())
        result = tiny.run(model, inputs)
        assert close(result, expected) and served.native == MODELS[name] and served.generic == 0
        model.unfuse_qkv_projections()
        assert close(tiny.run(model, inputs), expected) and served.generic == 0


def test_fused_sd3_attention_is_what_diffusers_computes(served):
    """Its fused processor leaves the norms out; so do we."""
    attn = legacy.Attention(
        query_dim=32, heads=2, dim_head=16, added_kv_proj_dim=32, context_pre_only=False, bias=True, qk_norm="rms_norm",
        processor=legacy.JointAttnProcessor2_0(),
    )  # fmt: skip
    attn.fuse_projections()
    attn.set_processor(legacy.FusedJointAttnProcessor2_0())
    image, text = torch.randn(1, 6, 32), torch.randn(1, 3, 32)
    with torch.no_grad():
        expected = attn(image, encoder_hidden_states=text)
        attn.set_processor(FFPAAttnProcessor())
        result = attn(image, encoder_hidden_states=text)
    assert served.native == 1 and all(close(ours, theirs) for ours, theirs in zip(result, expected, strict=True))


# --- what is not known goes the generic way ---------------------------------------------------------------------------


def test_every_rewritten_processor_is_still_what_it_was():
    """A new diffusers release that changes one of them needs a new look here, then its new fingerprint."""
    import importlib

    for path, known in native._KNOWN.items():
        module, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        assert native.fingerprint(kind, known.helpers) in known.fingerprints, path
        assert native.native_of(kind) is known.native


def test_a_changed_processor_goes_the_generic_way(monkeypatch, served):
    path = f"{native._FLUX}.FluxAttnProcessor"
    monkeypatch.setitem(native._KNOWN, path, native._KNOWN[path]._replace(fingerprints=("0" * 16,)))
    native.native_of.cache_clear()
    try:
        expected, result, _ = both("flux")
    finally:
        native.native_of.cache_clear()
    assert close(result, expected) and served.native == 0 and served.generic == 2


def test_a_subclass_goes_the_generic_way(served):
    kind = transformer_flux.FluxAttnProcessor

    class Mine(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            return tuple(part * 2 for part in out) if isinstance(out, tuple) else out * 2

    expected, result, _ = both("flux", lambda model: model.set_attn_processor(Mine()))
    assert close(result, expected) and served.native == 0


def test_source_that_cannot_be_read_goes_the_generic_way(monkeypatch):
    def unreadable(_: Any) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(native.inspect, "getsource", unreadable)
    kind = transformer_flux.FluxAttnProcessor
    assert native.fingerprint(kind, ()) is None and native.native_of.__wrapped__(kind) is None


def test_another_backend_of_diffusers_wins(served):
    model, inputs = make("flux")
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        model.set_attn_processor(FFPAAttnProcessor())
        try:
            model.set_attention_backend("native")
            assert close(tiny.run(model, inputs), expected) and served.native == 0 and not served.attention
        finally:
            from diffusers.models import attention_dispatch

            attention_dispatch._AttentionBackendRegistry.set_active_backend(
                attention_dispatch.AttentionBackendName.NATIVE
            )
            model.reset_attention_backend()
        assert close(tiny.run(model, inputs), expected) and served.native == 2


@pytest.mark.parametrize("rotary", ["batched", "short", "list"])
def test_rotary_tables_of_other_shapes(rotary, served):
    attn = transformer_flux.FluxAttention(32, heads=2, dim_head=16, out_dim=32, pre_only=True)
    x, tables = torch.randn(2, 6, 32), [torch.randn(6, 16) for _ in range(2)]
    if rotary == "batched":
        tables = [torch.randn(2, 6, 16) for _ in range(2)]
    elif rotary == "short":
        tables = [table[:1] for table in tables]
    outcomes = []
    for processor in (None, FFPAAttnProcessor()):
        if processor is not None:
            attn.set_processor(processor)
        try:
            with torch.no_grad():
                outcomes.append(attn(x, image_rotary_emb=tables))
        except Exception as error:
            outcomes.append(type(error))
    expected, result = outcomes
    assert result is expected if isinstance(expected, type) else close(result, expected)
    assert served.native == (rotary == "list")


def test_forward_mode_derivatives_are_not_lost(kernel):
    attn = transformer_flux.FluxAttention(32, heads=2, dim_head=16, out_dim=32, pre_only=True)
    attn.set_processor(FFPAAttnProcessor(backend="sdpa"))
    x, tangent = torch.randn(1, 6, 32), torch.randn(1, 6, 32)
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, derivative = torch.func.jvp(attn, (x,), (tangent,))
        step = (attn(x + 1e-2 * tangent) - attn(x - 1e-2 * tangent)) / 2e-2
    assert derivative.abs().max() > 1e-2 and (derivative - step).abs().max() <= 1e-2 * derivative.abs().max()


def test_a_batch_of_calls_by_vmap(served):
    attn = transformer_flux.FluxAttention(
        32, heads=2, dim_head=16, added_kv_proj_dim=32, out_dim=32, context_pre_only=False
    )
    attn.set_processor(FFPAAttnProcessor(backend="sdpa"))
    images, text = torch.randn(3, 1, 6, 32), torch.randn(1, 4, 32)
    with torch.no_grad():
        batched = torch.func.vmap(lambda image: attn(image, text)[0])(images)
        one_by_one = torch.stack([attn(image, text)[0] for image in images])
    assert close(batched, one_by_one) and served.native == 4


@pytest.mark.parametrize("shape", [(2, 5), (2, 1, 5), (8, 1, 5), (2, 9, 5)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_unets_in_every_shape(shape, kind, served):
    attn = legacy.Attention(
        32, heads=4, dim_head=8, cross_attention_dim=20,
        processor=legacy.AttnProcessor2_0(),
    )  # fmt: skip
    x, context = torch.randn(2, 9, 32), torch.randn(2, 5, 20)
    mask = torch.rand(shape) > 0.3 if kind == "bool" else torch.randn(shape)
    with torch.no_grad():
        expected = attn(x, context, attention_mask=mask)
        attn.set_processor(FFPAAttnProcessor())
        result = attn(x, context, attention_mask=mask)
    assert close(result, expected) and served.native == 1
    assert served.attention[0]["attn_mask"].shape[1] == (4 if shape[0] == 8 else 1), "one mask was repeated for heads"


def test_without_the_kernel_the_generic_way_is_taken(monkeypatch, pays, served):
    """diffusers' own operations are as good as ours in torch; only a mask of N x N is worth more."""
    monkeypatch.setattr(native, "pays", pays)
    for name, expected in (("flux", 0), ("wan", 0), ("sd3", 0), ("hunyuan_video15", 2), ("unet_sdxl", 16)):
        served.native = 0
        model, inputs = make(name)
        model.set_attn_processor(FFPAAttnProcessor())
        with torch.no_grad():
            tiny.run(model, inputs)
        assert served.native == expected, name


def test_a_gradient_takes_the_generic_way(monkeypatch, pays):
    monkeypatch.setattr(projections, "runs_on", lambda device, dtype: True)
    attn = transformer_flux.FluxAttention(32, heads=2, dim_head=16, out_dim=32, pre_only=True)
    x = torch.randn(1, 6, 32)
    assert not pays(attn, x)
    with torch.no_grad():
        assert pays(attn, x)
    attn.requires_grad_(False)
    assert pays(attn, x) and not pays(attn, x.requires_grad_())


def test_sites_and_routes_are_reported():
    model, inputs = make("flux")
    model.set_attn_processor(FFPAAttnProcessor())
    with torch.no_grad():
        tiny.run(model, inputs)
    assert len(ffpa_hf.report(model)) == 2


def test_models_with_native_processors_are_copied_and_pickled(served):
    model, inputs = make("wan")
    model.set_attn_processor(FFPAAttnProcessor())
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        served.native = 0
        assert close(tiny.run(copy.deepcopy(model), inputs), expected) and served.native == 4
    slot = capture.slot_of(model.blocks[0].attn1)
    assert pickle.loads(pickle.dumps(slot.native)) is slot.native


# --- masks in O(N) ----------------------------------------------------------------------------------------------------


def kinds(served: SimpleNamespace) -> set[str]:
    return {
        "none"
        if mask is None
        else "intervals"
        if isinstance(mask, RowIntervals)
        else "x".join(map(str, mask.shape[2:]))
        for mask in (call["attn_mask"] for call in served.attention)
    }


def test_padded_text_of_hunyuan_video15_makes_no_square_mask(served):
    expected, result, model = both("hunyuan_video15")
    assert close(result, expected)
    joint = [c for c in served.attention if c["site"] is model.transformer_blocks[0].attn]
    assert len(joint) == 1 and isinstance(joint[0]["attn_mask"], RowIntervals)


def test_padding_of_chroma_is_known_to_enable(served):
    model, inputs = make("chroma")
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        with ffpa_hf.enabled(model):
            assert close(tiny.run(model, inputs), expected)
        assert kinds(served) == {"intervals"} and len(served.attention) == 2
        served.attention.clear()
        model.set_attn_processor(FFPAAttnProcessor())  # which is not told where the mask comes from
        assert close(tiny.run(model, inputs), expected) and kinds(served) == {"24x24"}


def test_padding_intervals_are_the_outer_product():
    keep = torch.rand(3, 9) > 0.4
    keep[0] = False
    intervals = projections.padding_intervals(keep)
    assert torch.equal(intervals.dense(9)[:, 0], keep[:, :, None] & keep[:, None, :])


def vae_hunyuan_video15() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLHunyuanVideo15(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(16,) * 5, layers_per_block=1
    )
    return model.eval(), {"sample": torch.randn(1, 3, 5, 32, 32)}


@pytest.mark.parametrize("name", ["vae_hunyuan_video", "vae_hunyuan_video15"])
def test_frame_causal_autoencoders_make_no_square_mask(name, served):
    model, inputs = vae_hunyuan_video15() if name not in tiny.EVERY else make(name)
    classes = [type(module) for module in model.modules()]
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        ffpa_hf.enable(model)
        ffpa_hf.enable(model, backend="sdpa")
        assert close(tiny.run(model, inputs), expected)
        assert kinds(served) == {"intervals"} and {c["route"].backend.name for c in served.attention} == {"sdpa"}
        again = pickle.loads(pickle.dumps(model))
        assert close(tiny.run(again, inputs), expected)
        ffpa_hf.disable(model)
        served.attention.clear()
        assert close(tiny.run(model, inputs), expected) and not served.attention
    assert [type(module) for module in model.modules()] == classes


def test_frame_causal_gradients(served):
    """As near to the gradients in float64 as the default processors': rounding grows on the way through this model."""
    model, inputs = make("vae_hunyuan_video")
    model.train()

    def gradients(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
        model.zero_grad()
        tiny.run(model, inputs).square().sum().backward()
        return [p.grad.double().clone() for p in model.parameters() if p.grad is not None]

    def off(found: list[torch.Tensor]) -> float:
        pairs = zip(found, exact, strict=True)
        return max((a - b).abs().max().item() / max(1, b.abs().max().item()) for a, b in pairs)

    exact = gradients(copy.deepcopy(model).double(), {name: tensor.double() for name, tensor in inputs.items()})
    default = off(gradients(model, inputs))
    ffpa_hf.enable(model)
    model.enable_gradient_checkpointing()
    assert off(gradients(model, inputs)) <= TOLERANCE + 2 * default < 1e-3
    assert kinds(served) == {"intervals"}


def test_an_interval_mask_that_no_native_processor_takes_becomes_dense(served, monkeypatch):
    model, inputs = make("vae_hunyuan_video")
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        ffpa_hf.enable(model)
        monkeypatch.setattr(FFPAAttnProcessor, "_alone", lambda self, slot: False)
        assert close(tiny.run(model, inputs), expected) and served.native == 0 and "intervals" not in kinds(served)


def test_a_block_whose_attention_is_not_ours_makes_its_own_mask(served):
    model, inputs = make("vae_hunyuan_video")
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        ffpa_hf.enable(model)
        for module in model.modules():
            if capture.holds_processor(module):
                module.set_processor(legacy.AttnProcessor2_0())
        assert close(tiny.run(model, inputs), expected) and not served.attention


def test_an_interval_argument_means_the_same_to_torch():
    from ffpa_hf.processors.mask_sources import frame_causal
    from ffpa_hf.processors.redirect import IntervalArgument

    intervals = frame_causal(3, 2, torch.device("cpu"))
    query, key, value = (torch.randn(1, 1, 6, 8) for _ in range(3))
    dense = torch.ones(3, 3, dtype=torch.bool).tril().repeat_interleave(2, 0).repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)
    result = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=IntervalArgument(intervals))
    assert torch.equal(result, expected)
    assert generic._dense(intervals, (query[0],), {}).exp().bool().equal(dense[None])


# --- autoencoders in float32 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vae_kl", "vae_wan", "vae_hunyuan_video"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_of_an_autoencoder_in_a_lower_dtype(name, dtype, served):
    model, inputs = make(name)
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        with ffpa_hf.enabled(model, vae_attention_dtype=dtype):
            result = tiny.run(model, inputs)
        assert {call["query"].dtype for call in served.attention} == {dtype}
        error = (result - expected).norm() / expected.norm()
        assert result.dtype == torch.float32 and 0 < error < 2e-2
        assert close(tiny.run(model, inputs), expected)


def test_a_lower_dtype_touches_float32_alone_and_autoencoders_alone(served):
    model, inputs = make("vae_kl")
    with torch.no_grad(), ffpa_hf.enabled(model.half(), vae_attention_dtype=torch.bfloat16):
        tiny.run(model, {name: value.half() for name, value in inputs.items()})
    assert {call["query"].dtype for call in served.attention} == {torch.float16}
    served.attention.clear()
    model, inputs = make("flux")
    with torch.no_grad(), ffpa_hf.enabled(model, vae_attention_dtype=torch.bfloat16):
        tiny.run(model, inputs)
    assert {call["query"].dtype for call in served.attention} == {torch.float32}


def test_gradients_come_back_through_a_lower_dtype():
    model, inputs = make("vae_kl")
    with ffpa_hf.enabled(model, vae_attention_dtype=torch.bfloat16):
        tiny.run(model, inputs).square().sum().backward()
    attn = next(module for module in model.modules() if capture.holds_processor(module))
    assert attn.to_q.weight.grad is not None and attn.to_q.weight.grad.abs().max() > 0


def test_impossible_dtypes_are_refused():
    model, _ = make("vae_kl")
    with pytest.raises(ValueError, match="vae_attention_dtype"):
        ffpa_hf.enable(model, vae_attention_dtype=torch.float32)
    with pytest.raises(ValueError, match="give one"):
        ffpa_hf.enable(model, vae_attention_dtype=torch.bfloat16, precision="auto")
    assert not any(capture.slot_of(module) for module in model.modules())


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flux", "qwen_image", "wan"])
def test_native_processors_compile_whole(name, monkeypatch):
    """Whole, with the kernel's operator in the graph."""
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in module.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    if torch.cuda.is_available():
        pytest.skip("the interpreter is off beside a GPU; tests/gpu/test_native_processors.py compiles there")
    monkeypatch.setattr("ffpa_hf.joint._kernel_serves", lambda streams, factors, across_heads: True)
    torch._dynamo.reset()
    model, inputs = make(name)
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        model.set_attn_processor(FFPAAttnProcessor())
        block = (model.blocks if name == "wan" else model.transformer_blocks)[0]
        block.compile(fullgraph=True, backend=backend)
        result = tiny.run(model, inputs)
    assert close(result, expected) and len(graphs) == 1
    assert graphs[0].count(torch.ops.ffpa.join_streams.default) == (4 if name == "wan" else 2)
