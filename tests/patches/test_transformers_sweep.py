"""Many tiny causal families x every way to call them, "ffpa" against "eager": logits, gradients, tokens.

The large grid behind test_transformers.py; what a new transformers release changed shows here first.
"""

from __future__ import annotations

import pytest
import tiny_transformers as tiny
import torch
import transformers
from transformers import masking_utils

pytestmark = pytest.mark.slow

BASE = {
    "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "attention_dropout": 0.0,
}  # fmt: skip
LATENT = {
    "moe_intermediate_size": 16, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 2,
}  # fmt: skip
HALF_LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}

#: name -> (model class, what its config adds to BASE)
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 5}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", HALF_LOCAL),
    "cohere2": ("Cohere2ForCausalLM", HALF_LOCAL),
    "granite": ("GraniteForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "opt": ("OPTForCausalLM", OPT),
    "gemma": ("GemmaForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 16, **HALF_LOCAL}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 16, **HALF_LOCAL}),
    "gemma3_bidirectional": ("Gemma3ForCausalLM", {"head_dim": 16, "use_bidirectional_attention": True, **HALF_LOCAL}),
    "gemma4": ("Gemma4ForCausalLM", None),
    "gemma4_shared": ("Gemma4ForCausalLM", None),
    "gemma4_bidirectional": ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}),
    "gemma4_moe": (
        "Gemma4ForCausalLM",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    ),
    "gpt_oss": ("GptOssForCausalLM", {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, **HALF_LOCAL}),
    "llama4": (
        "Llama4ForCausalLM",
        {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 4, "intermediate_size_mlp": 48,
         "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {"head_dim": 16, "num_kv_shared_layers": 2, "num_hidden_layers": 4, "intermediate_size": [48] * 4,
         "layer_types": HALF_LOCAL["layer_types"] * 2, "sliding_window": 5, "laurel_rank": 4, "altup_num_inputs": 2,
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": tiny.VOCAB,
         "activation_sparsity_pattern": [0.0] * 4},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {"residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": 5}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM", {**LATENT, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
    ),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        {"head_dim": 16, "num_key_value_heads": 1, "moe_intermediate_size": 16, "n_routed_experts": 4,
         "q_lora_rank": 16, "num_experts_per_tok": 2, "sliding_window": 5, "index_topk": 2, "index_n_heads": 2,
         "index_head_dim": 16, "qk_rope_head_dim": 8, "o_lora_rank": 8, "o_groups": 2},
    ),
}  # fmt: skip

#: What a family cannot do under any implementation of transformers itself: (family, way) -> why.
UPSTREAM = {
    "positions": {
        "gpt2": "never hands positions to its mask",
        "opt": "never hands positions to its mask",
        "gpt_oss": "never hands positions to its mask",
    },
}


REMAP = "remap_positions_for_packed_sequence"


def build(family, implementation):
    class_name, changes = FAMILIES[family]
    cls = getattr(transformers, class_name)
    if family.startswith("gemma4"):
        config = tiny.config("gemma4_shared" if family == "gemma4_shared" else "gemma4", **(changes or {}))
    else:
        config = cls.config_class(**{**BASE, **changes})
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(family):
        if family not in made:
            made[family] = [build(family, implementation) for implementation in ("ffpa", "eager")]
        return made[family]

    return get


def compare(pair, inputs, keep=None, reference=None, **call):
    results = []
    for model, given in zip(pair, (inputs, inputs if reference is None else reference), strict=True):
        model.zero_grad()
        logits = model(**given, **call).logits
        logits = logits if keep is None else logits[keep]
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        results.append((logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (logits, grads), (wanted, wanted_grads) = results
    torch.testing.assert_close(logits, wanted, rtol=2e-4, atol=2e-5)
    floor = 1e-3 * max(grad.abs().max() for grad in wanted_grads.values())  # biases of keys have none but noise
    for name, grad in wanted_grads.items():
        error = (grads[name] - grad).abs().max() / torch.maximum(grad.abs().max(), floor)
        assert error < 1e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding(family, padding, models):
    inputs = tiny.batch(padding)
    keep = inputs.get("attention_mask", torch.ones(2, 11)).bool()
    compare(models(family), inputs, keep, use_cache=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing(family, models):
    inputs = tiny.batch("right")
    for model in models(family):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    try:
        compare(models(family), inputs, inputs["attention_mask"].bool(), use_cache=False)
    finally:
        for model in models(family):
            model.gradient_checkpointing_disable()
            model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_four_dimensional_masks(family, models):
    keep = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril() & (torch.rand(2, 1, 11, 11) > 0.2)
    keep |= torch.eye(11, dtype=torch.bool)
    low = torch.zeros(2, 1, 11, 11).masked_fill(~keep, torch.finfo(torch.float32).min)
    if family == "opt":
        pytest.skip("counts its positions in the mask, which must have two dimensions")
    tokens = tiny.batch()["input_ids"]
    for mask in (low, keep):
        compare(
            models(family),
            {"input_ids": tokens, "attention_mask": mask},
            reference={"input_ids": tokens, "attention_mask": low},
            use_cache=False,
        )


@pytest.mark.parametrize("way", ["positions", "lengths"])
@pytest.mark.parametrize("family", FAMILIES)
def test_documents(family, way, models):
    if way == "lengths" and family == "deepseek_v32":
        pytest.skip("its indexer chooses keys before the lengths are known to it")
    if way == "positions" and "bidirectional" in family:
        pytest.skip("a mask where every token sees every other hides the documents that positions tell of")
    if way == "positions" and family in UPSTREAM["positions"]:
        pytest.skip(UPSTREAM["positions"][family])
    sizes = (4, 3, 6)
    tokens = torch.randint(2, tiny.VOCAB, (1, 13), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(n) for n in sizes])[None]
    edges = torch.tensor([0, 4, 7, 13], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges} if way == "lengths" else {"use_cache": False}
    ours, eager = models(family)
    with torch.no_grad():
        logits = ours(tokens, position_ids=positions, **lengths).logits
        wanted = torch.cat([eager(part, use_cache=False).logits for part in tokens.split(sizes, dim=1)], dim=1)
        if way == "positions" and family == "llama4" and not hasattr(masking_utils, REMAP):
            wanted = eager(tokens, position_ids=positions, **lengths).logits  # 5.17 counts chunks from the pack's start
    torch.testing.assert_close(logits, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "dynamic, chunks", "static, chunks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(family, cache, padding, models):
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": "static"} if "static" in cache else {}
    options |= {"prefill_chunk_size": 4} if "chunks" in cache else {}
    inputs = {"attention_mask": torch.ones(2, 11, dtype=torch.long), **tiny.batch(padding)}
    ours, eager = models(family)
    try:
        wanted = eager.generate(**inputs, **options)
    except Exception as error:
        pytest.skip(f'"eager" itself fails: {type(error).__name__}: {str(error)[:80]}')
    assert torch.equal(ours.generate(**inputs, **options), wanted)
