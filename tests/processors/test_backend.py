"""What ffpa_hf adds to diffusers itself: the "ffpa" backend, the grafted setters, and that all of it can be undone."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers_models as tiny  # noqa: E402
from diffusers.models import attention, attention_dispatch, attention_processor, modeling_utils  # noqa: E402
from diffusers.models.attention_dispatch import dispatch_attention_fn  # noqa: E402

import ffpa_hf  # noqa: E402
from ffpa_hf import FFPAAttnProcessor  # noqa: E402
from ffpa_hf.processors import capture  # noqa: E402

TOLERANCE = 1e-5
Names = attention_dispatch.AttentionBackendName
Registry = attention_dispatch._AttentionBackendRegistry


@pytest.fixture(autouse=True)
def _native_afterwards():
    """set_attention_backend also sets diffusers' process-wide backend."""
    yield
    Registry.set_active_backend(Names.NATIVE)
    ffpa_hf.register()


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
    )


# --- the name ---------------------------------------------------------------------------------------------------------


def test_the_name_behaves_like_diffusers_own():
    member = Names("ffpa")
    assert member is Names.FFPA and member == "ffpa" and isinstance(member, Names)
    assert member in list(Names) and "ffpa" in {name.value for name in Names.__members__.values()}
    assert copy.deepcopy(member) is member and pickle.loads(pickle.dumps(member)) is member
    assert member in Registry.list_backends()


def test_register_is_idempotent_and_unregister_leaves_nothing():
    setter = attention_processor.Attention.set_processor
    ffpa_hf.register()
    assert attention_processor.Attention.set_processor is setter
    ffpa_hf.unregister()
    ffpa_hf.unregister()
    assert "ffpa" not in Names._value2member_map_ and "FFPA" not in Names.__members__ and not hasattr(Names, "FFPA")
    assert not any("ffpa" in backend.value for backend in Registry.list_backends())
    assert "ffpa" not in Registry._supports_context_parallel
    for owner, names in (
        (attention_processor.Attention, ("set_processor", "set_attention_slice")),
        (attention.AttentionModuleMixin, ("set_processor",)),
        (modeling_utils.ModelMixin, ("set_attention_backend", "reset_attention_backend")),
    ):
        for name in names:
            assert not hasattr(getattr(owner, name), "__wrapped__"), name
    for name in ("set_attn_processor", "attn_processors"):
        assert name not in vars(modeling_utils.ModelMixin)
    with pytest.raises(ValueError, match="ffpa"):
        Names("ffpa")
    ffpa_hf.register()
    assert Names("ffpa") is Names.FFPA


def test_models_enabled_before_unregister_stay_accelerated(monkeypatch):
    model, inputs = tiny.make("flux")
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        ffpa_hf.enable(model)
        ffpa_hf.unregister()
        with tiny.counted(monkeypatch) as calls:
            result = tiny.run(model, inputs)
    assert len(calls) == 2 and (result - expected).abs().max() <= TOLERANCE
    ffpa_hf.disable(model)
    assert not any(capture.slot_of(module) for module in model.modules())


def test_a_diffusers_that_differs_is_no_reason_to_fail(caplog):
    """Additions run while diffusers is being imported: what does not fit is left out, and what was begun undone."""
    from types import SimpleNamespace

    from ffpa_hf.processors import registry

    name = "diffusers.models.attention_processor"
    registry.undo()

    class Attention:
        def set_processor(self, processor):
            raise NotImplementedError

    plain = Attention.set_processor
    with caplog.at_level("WARNING", logger="ffpa_hf"):
        registry._add(SimpleNamespace(__name__=name, Attention=Attention))  # no set_attention_slice
    assert Attention.set_processor is plain and name not in registry._undo
    assert "set_attention_slice" in caplog.text and "ffpa_hf.enable" in caplog.text


# --- diffusers' switch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flux", "hunyuan_video", "sd3", "unet_sdxl", "vae_kl", "mochi", "cosmos"])
def test_set_attention_backend_reaches_every_processor(name, monkeypatch):
    model, inputs = tiny.make(name)
    before = [module.processor for module in model.modules() if capture.holds_processor(module)]
    with torch.no_grad():
        with tiny.AttentionOps() as ops:
            expected = tiny.run(model, inputs)
        model.set_attention_backend("ffpa")
        with tiny.counted(monkeypatch) as calls:
            result = tiny.run(model, inputs)
        model.reset_attention_backend()
        Registry.set_active_backend(Names.NATIVE)  # which diffusers' reset leaves as it was
        with tiny.counted(monkeypatch) as after:
            tiny.run(model, inputs)
    assert (result - expected).abs().max() <= TOLERANCE
    assert len(calls) == ops.count - (name == "mochi")  # Mochi's pooling is inline
    assert len(after) == 0
    now = [module.processor for module in model.modules() if capture.holds_processor(module)]
    assert all(a is b for a, b in zip(now, before, strict=True))


def test_another_backend_takes_over_from_the_switch(monkeypatch):
    model, inputs = tiny.make("sd3")
    model.set_attention_backend("ffpa")
    model.set_attention_backend("native")
    with torch.no_grad(), tiny.counted(monkeypatch) as calls:
        tiny.run(model, inputs)
    assert calls == []


@pytest.mark.parametrize("name", ["flux", "sd3", "cosmos"])
def test_our_processor_steps_aside_for_a_backend_chosen_after_it(name, monkeypatch):
    model, inputs = tiny.make(name)
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        model.set_attn_processor(FFPAAttnProcessor())
        for backend, served in (("native", False), ("ffpa", True), ("native", False), (None, True)):
            if backend is None:
                model.reset_attention_backend()
                Registry.set_active_backend(Names.NATIVE)
            else:
                model.set_attention_backend(backend)
            with tiny.counted(monkeypatch) as calls:
                assert (tiny.run(model, inputs) - expected).abs().max() <= TOLERANCE
            assert bool(calls) == served, backend


def test_the_switch_leaves_a_chosen_processor_alone():
    model, _ = tiny.make("sd3")
    mine = FFPAAttnProcessor("triton")
    model.set_attn_processor(mine)
    model.set_attention_backend("ffpa")
    model.reset_attention_backend()
    assert all(processor is mine for processor in model.attn_processors.values())


def test_context_manager_serves_models_without_any_processor_of_ours(monkeypatch):
    model, inputs = tiny.make("flux")
    with torch.no_grad():
        expected = tiny.run(model, inputs)
        with attention_dispatch.attention_backend("ffpa"), tiny.counted(monkeypatch) as calls:
            result = tiny.run(model, inputs)
        with tiny.counted(monkeypatch) as after:
            tiny.run(model, inputs)
    assert (result - expected).abs().max() <= TOLERANCE
    assert len(calls) == 2 and after == []
    assert all(call["site"] is None for call in calls)


def test_no_call_is_served_twice_when_processor_and_active_backend_meet(monkeypatch):
    model, inputs = tiny.make("cosmos")  # asks the dispatcher without naming a backend
    model.set_attn_processor(FFPAAttnProcessor())
    with torch.no_grad(), attention_dispatch.attention_backend("ffpa"), tiny.counted(monkeypatch) as calls:
        tiny.run(model, inputs)
    assert len(calls) == 4


def test_debug_checks_of_the_dispatcher_pass(monkeypatch):
    monkeypatch.setattr(Registry, "_checks_enabled", True)
    query = torch.randn(1, 4, 2, 8)
    dispatch_attention_fn(query, query, query, backend="ffpa")
    with pytest.raises(ValueError, match="same dtype"):
        dispatch_attention_fn(query, query.double(), query, backend="ffpa")


def test_backend_honours_every_argument_and_returns_the_log_sum_exp():
    function = Registry._backends[Names.FFPA]
    query, key = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    native = Registry._backends[Names.NATIVE]
    for more in ({"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.randn(2, 1, 5, 5)}):
        expected = native(query, key, key, enable_gqa=True, **more)
        assert (function(query, key, key, enable_gqa=True, **more) - expected).abs().max() <= TOLERANCE
        assert (expected - native(query, key, key, enable_gqa=True)).abs().max() > 1e-3
    out, lse = function(query, query, query, return_lse=True)
    scores = torch.einsum("bnhd,bmhd->bnhm", query, query) / 8**0.5
    assert lse.shape == (2, 5, 4) and (lse - scores.logsumexp(-1)).abs().max() <= TOLERANCE
    assert (out - native(query, query, query)).abs().max() <= TOLERANCE


def test_a_block_mask_goes_to_flex(monkeypatch):
    from torch.nn.attention.flex_attention import create_block_mask

    seen: list[dict[str, Any]] = []

    def flex(query, key, value, **keywords):
        seen.append(keywords)
        return query

    monkeypatch.setitem(Registry._backends, Names.FLEX, flex)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    query = torch.randn(1, 128, 1, 16)
    result = dispatch_attention_fn(query, query, query, attn_mask=mask, scale=0.5, backend="ffpa")
    assert result is query and seen[0]["attn_mask"] is mask and seen[0]["scale"] == 0.5


# --- processors that stay as they are ---------------------------------------------------------------------------------


def test_flex_pinned_processors_run_unchanged_and_are_reported():
    class Pinned:
        _attention_backend = "flex"

        def __call__(self, attn, hidden_states, **_):
            return dispatch_attention_fn(hidden_states, hidden_states, hidden_states, backend=self._attention_backend)

    module = attention_processor.Attention(8, heads=1, dim_head=8)
    pinned = Pinned()
    module.set_processor(pinned)
    module.set_processor(FFPAAttnProcessor())
    assert module.processor is pinned and capture.slot_of(module) is None
    assert "flex" in ffpa_hf.report(module).rows[0].reason
    model, _ = tiny.make("vae_kl")
    model.decoder.mid_block.attentions[0].set_processor(pinned)
    model.set_attention_backend("ffpa")  # diffusers writes the name on it, and it would raise
    assert pinned._attention_backend == "flex"


def test_attention_imported_under_another_name_is_found(monkeypatch):
    module = attention_processor.Attention(8, heads=1, dim_head=8)
    namespace: dict[str, Any] = {}
    source = (
        "from torch.nn.functional import scaled_dot_product_attention as attend\n"
        "class Mine:\n"
        "    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):\n"
        "        query = attn.to_q(hidden_states)[:, None]\n"
        "        return attend(query, query, query)[:, 0]\n"
    )
    exec(source, namespace)
    hidden = torch.randn(1, 3, 8)
    module.set_processor(namespace["Mine"]())
    expected = module(hidden)
    module.set_processor(FFPAAttnProcessor())
    with tiny.counted(monkeypatch) as calls:
        assert torch.equal(module(hidden), expected)
    assert len(calls) == 1


def _mixed_helper(query: Any) -> Any:
    return dispatch_attention_fn(query, query, query)


@pytest.mark.parametrize("by", ["one call", "a helper"])
def test_calls_that_name_no_backend_are_reached_beside_calls_that_do(by, monkeypatch):
    """QwenImage 2.1's prefill passes backend=None."""

    class Mixed:
        _attention_backend = None

        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
            query = attn.to_q(hidden_states)[:, :, None]
            if by == "a helper":
                first = _mixed_helper(query)
            else:
                first = dispatch_attention_fn(query, query, query, backend=None)
            second = dispatch_attention_fn(first, first, first, backend=self._attention_backend)
            return second[:, :, 0]

    module, hidden = attention_processor.Attention(8, heads=1, dim_head=8), torch.randn(1, 3, 8)
    module.set_processor(Mixed())
    expected = module(hidden)
    module.set_processor(FFPAAttnProcessor())
    with tiny.counted(monkeypatch) as calls:
        assert torch.equal(module(hidden), expected)
    assert len(calls) == 2 and all(call["site"] is module for call in calls)


def test_linear_attention_runs_unchanged_and_is_reported():
    model, _ = tiny.make("sana")
    ffpa_hf.enable(model)
    kept = [
        module for module in model.modules() if type(getattr(module, "processor", None)).__name__.startswith("SanaLin")
    ]
    assert kept and all(capture.slot_of(module) is None for module in kept)
    rows = [row for row in ffpa_hf.report(model) if row.calls == 0]
    assert len(rows) == len(kept) and "no softmax attention" in rows[0].reason


# --- models without a setter ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["z_image", "mochi", "vae_cosmos"])
def test_models_without_set_attn_processor_get_one(name):
    model, _ = tiny.make(name)
    before = model.attn_processors
    assert before and all(key.endswith(".processor") for key in before)
    shared = FFPAAttnProcessor()
    model.set_attn_processor(shared)
    assert all(processor is shared for processor in model.attn_processors.values())
    model.set_attn_processor(dict(before))
    assert all(model.attn_processors[key] is processor for key, processor in before.items())
    assert not any(capture.slot_of(module) for module in model.modules())
    with pytest.raises(ValueError, match="attention modules"):
        model.set_attn_processor({"one": shared})


def test_a_model_with_inline_attention_only_says_how_to_reach_it(caplog):
    model, _ = tiny.make("vae_wan")
    with caplog.at_level("WARNING", logger="ffpa_hf"):
        model.set_attn_processor(FFPAAttnProcessor())
    assert "ffpa_hf.enable" in caplog.text


# --- import order, environment ----------------------------------------------------------------------------------------


REPORT = (
    "from diffusers.models.attention import AttentionModuleMixin as M\n"
    "from diffusers.models.attention_processor import Attention as A\n"
    "from diffusers.models.attention_dispatch import AttentionBackendName as N, _AttentionBackendRegistry as R\n"
    "print(hasattr(M.set_processor, '__wrapped__'), hasattr(A.set_processor, '__wrapped__'), N('ffpa') in R._backends,"
    " R._active_backend.value)"
)


@pytest.mark.parametrize(
    "imports",
    [
        "import ffpa_hf; from diffusers import FluxTransformer2DModel",
        "from diffusers import FluxTransformer2DModel; import ffpa_hf",
        "import ffpa_hf, diffusers.models.attention",
    ],
)
def test_every_import_order_registers(imports):
    done = python(f"{imports}\n{REPORT}")
    assert done.stdout.split() == ["True", "True", "True", "native"], done.stderr


def test_environment_variable_is_honoured_when_ffpa_hf_comes_first():
    done = python(f"import ffpa_hf, diffusers.models.attention_dispatch\n{REPORT}", DIFFUSERS_ATTN_BACKEND="ffpa")
    assert done.stdout.split() == ["True", "True", "True", "ffpa"], done.stderr


def test_importing_ffpa_hf_does_not_import_diffusers():
    done = python("import sys, ffpa_hf; from ffpa_hf import FFPAAttnProcessor; print('diffusers' in sys.modules)")
    assert done.stdout.split() == ["False"], done.stderr


# --- context parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_context_parallel_models_equal_the_whole_model(world, tmp_path):
    """Ring and Ulysses, with four processes both at once; forward and backward; see the script."""
    script = Path(__file__).with_name("context_parallel_script.py")
    path = os.pathsep.join([str(script.parents[2]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, str(rank), str(world), tmp_path / "meet"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world, "\n".join(outputs)


def test_ring_refuses_what_it_would_get_wrong():
    from types import SimpleNamespace

    config = SimpleNamespace(context_parallel_config=SimpleNamespace(ring_degree=2, ulysses_degree=1))
    query = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="ring"):
        dispatch_attention_fn(
            query, query, query, torch.ones(1, 4, dtype=torch.bool), backend="ffpa", parallel_config=config
        )
    with pytest.raises(NotImplementedError, match="dropout_p"):
        dispatch_attention_fn(query, query, query, dropout_p=0.1, backend="ffpa", parallel_config=config)


def test_parallelism_survives_a_change_of_processor():
    """enable_parallelism writes on the installed processor; without it the next would attend locally, silently."""
    model, _ = tiny.make("flux")
    module = model.transformer_blocks[0].attn
    original, first, config = module.processor, FFPAAttnProcessor(), object()
    model.set_attn_processor(first)
    first._parallel_config = config
    model.set_attn_processor(FFPAAttnProcessor())
    assert original._parallel_config is config
    ffpa_hf.disable(model)
    assert module.processor is original and original._parallel_config is config


def test_context_parallelism_without_the_dispatcher_raises():
    from types import SimpleNamespace

    model, inputs = tiny.make("sd3")
    shared = FFPAAttnProcessor()
    model.set_attn_processor(shared)
    shared._parallel_config = SimpleNamespace(context_parallel_config=object())
    with torch.no_grad(), pytest.raises(NotImplementedError, match="JointAttnProcessor2_0"):
        tiny.run(model, inputs)
