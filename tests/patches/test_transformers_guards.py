"""Who gets which mask, models that "ffpa" cannot serve, and the name in transformers' registries: nothing is ever
silently wrong.
"""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import warnings

import outside_transformers as outside
import pytest
import tiny_transformers as tiny
import torch
import transformers
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers_structure import structure

import ffpa_hf
from ffpa_hf.patches import attention_classes, attention_interface
from ffpa_hf.patches import transformers as patch
from ffpa_hf.patches.attention_interface import ffpa_attention_forward, ffpa_mask

MASKS = masking_utils.AttentionMaskInterface


@pytest.fixture(autouse=True)
def _fresh_warnings():
    attention_interface._warned.clear()


# --- who gets which mask ----------------------------------------------------------------------------------------------

#: Models that hand the config of a part that dispatches to the masks they build.
COMPOSED = {"gemma4_assistant", "gemma4_unified_assistant", "paligemma", "pi0"}
OUTSIDE = [path.partition(".")[0] for path in structure()["build masks but never dispatch"] if "blip_text" not in path]


def _config_class(model):
    module = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    configs = [c for c in classes if issubclass(c, transformers.PreTrainedConfig)]
    return next((c for c in configs if c.model_type == model), configs[0])


@pytest.mark.parametrize("model", sorted({*OUTSIDE, "git", "deepseek_v4"} - COMPOSED))
def test_models_that_compute_with_their_mask_get_an_additive_one(model):
    importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    config_class = _config_class(model)
    assert attention_interface._form_of(config_class, config_class.model_type) == "float"


@pytest.mark.parametrize(
    "model", ["llama", "gemma4", "gpt2", "t5", "bert", "whisper", "qwen2_vl", "siglip", "modernbert"]
)
def test_models_that_dispatch_get_intervals(model):
    importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    config_class = _config_class(model)
    form = attention_interface._form_of(config_class, f"{model}_text" if model == "gemma4" else config_class.model_type)
    assert form == "intervals"


@pytest.mark.parametrize("name", outside.MODELS)
def test_a_model_outside_the_interface_computes_as_under_eager(name):
    wanted = outside.outputs(outside.build(name, "eager"))
    for ours, theirs in zip(outside.outputs(outside.build(name, "ffpa")), wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_attention_classes_chosen_by_name_stay_as_they_are_and_say_so():
    module = importlib.import_module("transformers.models.gpt_neo.modeling_gpt_neo")
    module.GPT_NEO_ATTENTION_CLASSES["ffpa"].said = False
    with pytest.warns(UserWarning, match="GPTNeoSelfAttention computes its attention itself"):
        model = outside.build("gpt_neo", "ffpa")
    named = {row.module_name: row.reason for row in ffpa_hf.report(model)}
    assert named.keys() == {f"transformer.h.{layer}.attn.attention" for layer in (0, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outside.build("gpt_neo", "ffpa")


@pytest.mark.parametrize("path", attention_classes.TABLES)
def test_tables_of_attention_classes_know_the_name_while_it_is_registered(path):
    module = pytest.importorskip(f"transformers.models.{path}")
    classes = getattr(module, attention_classes.TABLES[path], None)
    if classes is None:  # this release moved the model to the interface
        assert "ALL_ATTENTION_FUNCTIONS" in vars(module)
        return
    before = {name: entry for name, entry in classes.items() if name != "ffpa"}
    assert isinstance(classes["ffpa"], attention_classes._Native)
    assert classes["ffpa"].own in (classes["eager"], classes.get("sdpa"))
    try:
        ffpa_hf.unregister()
        assert classes == before
    finally:
        ffpa_hf.register()
    assert "ffpa" in classes


def test_a_part_outside_the_interface_beside_parts_that_use_it():
    """BLIP's text model computes its attention itself, its vision model does not."""
    module = importlib.import_module("transformers.models.blip.modeling_blip_text")
    options = {"encoder_hidden_size": 32, "projection_dim": 16, "intermediate_size": 32, "num_attention_heads": 4}
    config = transformers.BlipTextConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2, max_position_embeddings=32, **options
    )
    inputs, out = tiny.batch("right"), {}
    for implementation in ("ffpa", "eager"):
        torch.manual_seed(0)
        model = module.BlipTextModel._from_config(config, attn_implementation=implementation).eval()
        out[implementation] = model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
    assert torch.equal(out["ffpa"], out["eager"])


def test_the_audio_tower_of_gemma4_gets_the_mask_it_can_read():
    config = transformers.Gemma4AudioConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, output_proj_dims=32, conv_kernel_size=3
    )
    module = importlib.import_module("transformers.models.gemma4.modeling_gemma4")
    sound, heard = torch.randn(2, 64, 128), torch.arange(64).expand(2, -1) < torch.tensor([[64], [40]])
    out = {}
    for implementation in ("ffpa", "eager", "sdpa"):
        torch.manual_seed(0)
        try:
            model = module.Gemma4AudioModel._from_config(copy.deepcopy(config), attn_implementation=implementation)
        except ValueError:  # releases that read an additive mask refuse "sdpa"
            continue
        out[implementation] = model.eval()(sound, heard).last_hidden_state
    # releases that accept "sdpa" here misread the additive mask of their own "eager"
    assert torch.equal(out["ffpa"], out.get("sdpa", out["eager"]))


def test_a_model_from_elsewhere_that_adds_its_mask_stops_at_its_first_call():
    mask = ffpa_mask(
        batch_size=1,
        q_length=4,
        kv_length=4,
        mask_function=masking_utils.causal_mask_function,
        config=type("Config", (), {"__module__": "elsewhere.configuration_own", "model_type": "own"})(),
    )
    with pytest.raises(NotImplementedError, match="attn_implementation='eager'"):
        torch.zeros(1, 2, 4, 4) + mask


# --- registration -----------------------------------------------------------------------------------------------------


@pytest.fixture
def registries():
    """Both registries, put back afterwards."""
    before = [dict(r._global_mapping) for r in (AttentionInterface, MASKS)]
    kept = dict(patch._before)
    yield AttentionInterface._global_mapping, MASKS._global_mapping
    for registry, entries in zip((AttentionInterface, MASKS), before, strict=True):
        registry._global_mapping.clear()
        registry._global_mapping.update(entries)
    patch._before.clear()
    patch._before.update(kept)
    ffpa_hf.register()  # unregister() took the name out of diffusers as well


def theirs(module, query, key, value, attention_mask, **kwargs):
    """Another package's attention."""
    return query.transpose(1, 2), None


def test_both_registries_hold_ours_and_forget_it(registries):
    assert [r["ffpa"] for r in registries] == [ffpa_attention_forward, ffpa_mask]
    ffpa_hf.register()
    ffpa_hf.unregister()
    assert all("ffpa" not in r for r in registries)
    with pytest.raises(RuntimeError, match="register"):
        ffpa_hf.enable(tiny.model("llama"))
    ffpa_hf.register()
    assert [r["ffpa"] for r in registries] == [ffpa_attention_forward, ffpa_mask]


def test_a_foreign_entry_is_named_and_given_back(registries):
    ffpa_hf.unregister()
    AttentionInterface.register("ffpa", theirs)
    with pytest.warns(UserWarning, match="test_transformers_guards.theirs"):
        ffpa_hf.register()
    assert [r["ffpa"] for r in registries] == [ffpa_attention_forward, ffpa_mask]
    ffpa_hf.unregister()
    assert registries[0]["ffpa"] is theirs and "ffpa" not in registries[1]


def test_an_entry_put_over_ours_stays_theirs(registries):
    AttentionInterface.register("ffpa", theirs)
    with pytest.raises(RuntimeError, match="another package"):
        ffpa_hf.enable(tiny.model("llama"))
    ffpa_hf.unregister()
    assert registries[0]["ffpa"] is theirs and "ffpa" not in registries[1]


def test_an_entry_that_hides_ours_in_the_shared_instance_is_found(registries):
    ALL_ATTENTION_FUNCTIONS["ffpa"] = theirs  # what models look at before the registry itself
    try:
        with pytest.raises(RuntimeError, match="another package"):
            ffpa_hf.enable(tiny.model("llama"))
    finally:
        del ALL_ATTENTION_FUNCTIONS["ffpa"]
    ffpa_hf.enable(tiny.model("llama"))


def test_half_of_the_name_taken_later_is_noticed_in_use(registries):
    model, inputs = tiny.model("llama", "ffpa"), tiny.batch("left")
    AttentionInterface.register("ffpa", theirs)
    with pytest.warns(UserWarning, match="another package"):
        model(**inputs)


@pytest.mark.parametrize("entry", ["missing", "foreign"])
def test_attention_without_its_mask_function_stops(registries, entry):
    model, inputs = tiny.model("llama", "ffpa"), tiny.batch("left")
    if entry == "missing":  # transformers then builds no mask at all, and the padding would be lost
        del registries[1]["ffpa"]
    else:
        MASKS.register("ffpa", lambda **_: None)
    with pytest.raises(RuntimeError, match="padding would be lost"):
        model(**inputs)


def test_both_functions_work_under_another_name(registries):
    AttentionInterface.register("mine", ffpa_attention_forward)
    model, inputs = tiny.model("llama", "mine"), tiny.batch("left")
    with pytest.raises(RuntimeError, match='"mine"'):
        model(**inputs)
    MASKS.register("mine", ffpa_mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        logits = model(**inputs).logits
    assert torch.equal(logits[0], tiny.model("llama", "ffpa")(**inputs).logits[0])


def test_one_registry_failing_leaves_both_as_they_were(registries, monkeypatch):
    ffpa_hf.unregister()

    def broken(*_):
        raise OSError("no")

    with monkeypatch.context() as context:
        context.setattr(MASKS, "register", broken)
        with pytest.raises(OSError):
            ffpa_hf.register()
    assert all("ffpa" not in r for r in registries)


@pytest.mark.parametrize("first", ["ffpa_hf", "transformers.modeling_utils", "ffpa_hf.patches.transformers"])
def test_the_order_of_imports_does_not_matter(first):
    program = (
        f"import {first}, ffpa_hf, sys\n"
        "from transformers.modeling_utils import AttentionInterface as A\n"
        "from transformers.masking_utils import AttentionMaskInterface as M\n"
        "assert A._global_mapping['ffpa'].__module__ == 'ffpa_hf.patches.attention_interface'\n"
        "assert 'ffpa' in M._global_mapping\n"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], check=True, timeout=300)
