"""Whole transformers models under attn_implementation="ffpa" against "eager" and "sdpa": logits, gradients, tokens."""

from __future__ import annotations

import copy

import pytest
import tiny_transformers as tiny
import torch
import torch._dynamo.testing
import transformers
from transformers.generation import CompileConfig

import ffpa_hf
from ffpa_hf import ffpa_attn_func
from ffpa_hf.masks import RowIntervals
from ffpa_hf.patches import attention_interface

FAMILIES = list(tiny.CLASSES)
PADDINGS = ["none", "left", "right", "holes"]
NOT_IN_SDPA = {"gemma2", "gpt_oss"}  # softcap, sinks


def run(model, inputs, **more):
    """Logits of real tokens, and the gradient of every parameter of a loss over them."""
    model.zero_grad()
    logits = model(**inputs, **more).logits
    keep = inputs.get("attention_mask", torch.ones(logits.shape[:2])).bool()[:, -logits.shape[1] :]
    logits = logits[keep]
    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
    (logits.float() * weights).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(model, other, inputs, **more):
    logits, grads = run(model, inputs, **more)
    wanted_logits, wanted_grads = run(other, inputs, **more)
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-5)
    assert grads.keys() == wanted_grads.keys()
    same_gradients(grads, wanted_grads)


def same_gradients(grads, wanted, tolerance=2e-5):
    """Within `tolerance` of each parameter's largest gradient."""
    for name, grad in wanted.items():
        error = (grads[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-6)
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.fixture(scope="module")
def models():
    """Family -> the same model under each implementation; made once."""
    made = {}

    def get(family, implementation):
        if (family, implementation) not in made:
            made[family, implementation] = tiny.model(family, implementation)
        return made[family, implementation]

    return get


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_eager_and_sdpa(family, padding, models):
    inputs = tiny.batch(padding)
    ours = models(family, "ffpa")
    check(ours, models(family, "eager"), inputs)
    if family not in NOT_IN_SDPA:
        check(ours, models(family, "sdpa"), inputs)
    served = {row.module_name for row in ffpa_hf.report(ours)}
    assert served == {f"model.layers.{i}.self_attn" for i in range(ours.config.num_hidden_layers)}


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_users_may_hand_over_four_dimensional_masks(family, models):
    tokens = tiny.batch()["input_ids"]
    keep = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril() & (torch.rand(2, 1, 11, 11) > 0.2)
    keep |= torch.eye(11, dtype=torch.bool)
    added = torch.zeros(2, 1, 11, 11).masked_fill(~keep, float("-inf"))
    low = torch.zeros(2, 1, 11, 11).masked_fill(~keep, torch.finfo(torch.float32).min)
    with torch.no_grad():
        wanted = models(family, "eager")(tokens, attention_mask=low).logits
        for mask in (keep, added, low):
            logits = models(family, "ffpa")(tokens, attention_mask=mask).logits
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


# --- packing ----------------------------------------------------------------------------------------------------------


def packed(lengths=(4, 3, 6)):
    tokens = torch.randint(2, tiny.VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return tokens, positions, {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 6, "max_length_k": 6}


def apart(model, tokens, lengths=(4, 3, 6)):
    """Logits of each document alone."""
    return torch.cat([model(part, use_cache=False).logits for part in tokens.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize("use_cache", [None, True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gemma4", "gemma4_shared", "gpt_oss"])
def test_packed_documents_never_see_each_other(family, use_cache, models):
    tokens, positions, lengths = packed()
    with torch.no_grad():
        wanted = apart(models(family, "eager"), tokens)
        ours = models(family, "ffpa")
        for more in ({}, {"attention_mask": torch.ones_like(tokens)}):
            logits = ours(tokens, position_ids=positions, use_cache=use_cache, **lengths, **more).logits
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma4"])
def test_restarting_positions_pack_documents_too(family, models):
    tokens, positions, _ = packed()
    with torch.no_grad():
        logits = models(family, "ffpa")(tokens, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(logits, apart(models(family, "eager"), tokens), rtol=1e-4, atol=1e-5)


def test_packed_gradients_are_those_of_the_documents_apart(models):
    tokens, positions, lengths = packed()
    grads = []
    for packing in (True, False):
        model = models("gemma4", "ffpa" if packing else "eager")
        model.zero_grad()
        logits = model(tokens, position_ids=positions, **lengths).logits if packing else apart(model, tokens)
        logits.square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    same_gradients(*grads)


@pytest.mark.parametrize("implementation_of_masks", ["none", "bool", "additive"])
def test_documents_stay_apart_under_any_mask(implementation_of_masks, models):
    tokens, positions, lengths = packed()
    keep = torch.ones(1, 1, 13, 13, dtype=torch.bool).tril()
    mask = {"none": None, "bool": keep, "additive": torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))}
    with torch.no_grad():
        logits = models("llama", "ffpa")(
            tokens, position_ids=positions, attention_mask=mask[implementation_of_masks], **lengths
        ).logits
        torch.testing.assert_close(logits, apart(models("llama", "eager"), tokens), rtol=1e-4, atol=1e-5)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    (
        "family",
        "reentrant",
    ),  # shared keys lose gradients in reentrant checkpoints, with every implementation
    [("llama", False), ("llama", True), ("gemma4", False), ("gemma4", True), ("gemma4_shared", False)],
)
def test_gradient_checkpointing_changes_nothing(family, reentrant, models):
    checkpointed = tiny.model(family, "ffpa")
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    checkpointed.train()
    check(checkpointed, models(family, "eager"), tiny.batch("left"), use_cache=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_keep_the_intervals(reentrant, monkeypatch):
    """Saved, packed by hooks and recomputed, a mask is still intervals when its attention runs again."""
    seen = []
    attend = attention_interface.attend

    def spy(*arguments, attn_mask, **options):
        seen.append(type(attn_mask))
        return attend(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(attention_interface, "attend", spy)
    model = tiny.model("mistral", "ffpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with torch.autograd.graph.save_on_cpu():
        loss = model(**tiny.batch("left"), use_cache=False).logits.sum()
    loss.backward()
    assert seen == [RowIntervals] * 4  # two layers, forward and again


def test_reentrant_checkpointing_with_shared_keys_warns(models):
    model = tiny.model("gemma4_shared", "ffpa")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model.train()
    with pytest.warns(UserWarning, match="use_reentrant"):
        model(**tiny.batch(), use_cache=False)


def test_dropout_reaches_the_attention():
    model = tiny.model("llama", "ffpa", attention_dropout=0.5).train()
    inputs = tiny.batch()
    torch.manual_seed(5)
    first, second = model(**inputs).logits, model(**inputs).logits
    torch.manual_seed(5)
    assert torch.equal(model(**inputs).logits, first) and not torch.equal(first, second)
    model.eval()
    torch.testing.assert_close(
        model(**inputs).logits, tiny.model("llama", "eager")(**inputs).logits, rtol=1e-4, atol=1e-5
    )


def test_float32_norms_beside_half_precision_weights_work():
    model = tiny.model("gemma4", "ffpa").to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            module.float()
            module.forward = lambda x, forward=module.forward: forward(x.float())  # a norm that returns float32
    logits = model(**tiny.batch("left")).logits
    wanted = tiny.model("gemma4", "eager").to(torch.bfloat16)(**tiny.batch("left")).logits
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits[0], wanted[0], rtol=0.1, atol=0.1)


# --- generation -------------------------------------------------------------------------------------------------------


def tokens_of(model, padding="left", **options):
    inputs = {"attention_mask": torch.ones(2, 11, dtype=torch.long), **tiny.batch(padding)}
    return model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "static, chunked prefill", "dynamic, chunked prefill"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gemma4", "gemma4_shared", "gpt_oss"])
def test_greedy_tokens_are_those_of_eager(family, cache, padding, models):
    options = {}
    if "static" in cache:
        options["cache_implementation"] = "static"
    if "chunked" in cache:
        options["prefill_chunk_size"] = 4
    try:
        wanted = tokens_of(models(family, "eager"), padding, **options)
    except Exception as error:
        if "AmbiguousGlobalPerLayer" not in type(error).__name__:
            raise
        pytest.skip("transformers 5.17 cannot prefill a static Gemma 4 cache in chunks, with any implementation")
    assert torch.equal(tokens_of(models(family, "ffpa"), padding, **options), wanted)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "prompt lookup"])
@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_other_ways_to_generate(family, options, models):
    wanted, ours = (
        model.generate(tiny.batch()["input_ids"][:1], max_new_tokens=8, do_sample=False, pad_token_id=0, **options)
        for model in (models(family, "eager"), models(family, "ffpa"))
    )
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_compiled_decoding_with_a_static_cache(family, models):
    """The decode step in one graph, as generate compiles it on a GPU; a sliding cache that fills up costs a second."""
    wanted = tokens_of(models(family, "eager"), cache_implementation="static", disable_compile=True)
    compiling = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiling._compile_all_devices = True  # generate leaves a CPU out otherwise
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours = tokens_of(tiny.model(family, "ffpa"), cache_implementation="static", compile_config=compiling)
    assert torch.equal(ours, wanted)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("keep", [1, 3, 0])
def test_cutting_the_logits_keeps_the_mask_aligned(keep, models):
    inputs = tiny.batch("left")
    with torch.no_grad():
        logits = models("gemma4_shared", "ffpa")(**inputs, logits_to_keep=keep).logits
        wanted = models("gemma4_shared", "eager")(**inputs).logits[:, -keep:]
    torch.testing.assert_close(logits[0], wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[1, -7:], wanted[1, -7:], rtol=1e-4, atol=1e-5)


# --- compilation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "padding"),
    [("llama", "none"), ("llama", "left"), ("gemma3", "left"), ("gemma4", "none"), ("gemma4", "left")],
)
def test_compiles_in_one_graph_forward_and_backward(family, padding, models):
    torch._dynamo.reset()
    model = tiny.model(family, "ffpa")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = tiny.batch(padding)
    keep = inputs.get("attention_mask", torch.ones(2, 11)).bool()
    logits = compiled(**inputs, use_cache=False).logits[keep]
    logits.square().sum().backward()
    wanted = models(family, "eager")
    wanted.zero_grad()
    wanted_logits = wanted(**inputs, use_cache=False).logits[keep]
    wanted_logits.square().sum().backward()
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-5)
    same_gradients(*({name: p.grad for name, p in m.named_parameters()} for m in (model, wanted)))


def test_a_second_length_recompiles_at_most_once():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tiny.model("gemma4", "ffpa"), fullgraph=True, backend=counter)
    for length in (9, 11, 12, 14):
        with torch.no_grad():
            compiled(**tiny.batch(length=length), use_cache=False)
    assert counter.frame_count <= 2


# --- loading ----------------------------------------------------------------------------------------------------------


def test_the_name_works_wherever_transformers_takes_one(tmp_path, models):
    inputs = tiny.batch("left")
    wanted = models("gemma4", "eager")(**inputs).logits[0]
    tiny.model("gemma4", "eager").save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ffpa")
    assert loaded.config._attn_implementation == "ffpa"
    torch.testing.assert_close(loaded(**inputs).logits[0], wanted, rtol=1e-4, atol=1e-5)
    switched = tiny.model("gemma4", "eager")
    switched.set_attn_implementation("ffpa")
    torch.testing.assert_close(switched(**inputs).logits[0], wanted, rtol=1e-4, atol=1e-5)
    switched.save_pretrained(tmp_path / "again")
    assert '"ffpa"' not in (tmp_path / "again" / "config.json").read_text()


def test_the_kernels_serve_a_model_that_asks_for_them(forced, device):
    """fp16 through the Triton kernels (the interpreter on a CPU), two head dims, padding, forward and backward."""
    ours = tiny.model("gemma4", "eager", num_key_value_heads=2).to(device, torch.float16)
    other = copy.deepcopy(ours)
    ffpa_hf.enable(ours, backend="triton", strict=True)
    inputs = {name: tensor.to(device) for name, tensor in tiny.batch("left").items()}
    logits, grads = run(ours, inputs, use_cache=False)
    wanted, wanted_grads = run(other, inputs, use_cache=False)
    assert {row.backend for row in ffpa_hf.report(ours)} == {"triton"}
    torch.testing.assert_close(logits, wanted, rtol=0.02, atol=0.02)
    same_gradients(grads, wanted_grads, tolerance=0.02)


def test_public_function_is_what_the_models_call():
    """The attention a model runs is `ffpa_attn_func`'s: one definition."""
    query = torch.randn(1, 2, 5, 16)
    from ffpa_hf.patches.attention_interface import ffpa_attention_forward

    module = torch.nn.Module()
    out, weights = ffpa_attention_forward(module, query, query, query, None)
    assert weights is None and out.is_contiguous()
    torch.testing.assert_close(out.transpose(1, 2), ffpa_attn_func(query, query, query, is_causal=True))
