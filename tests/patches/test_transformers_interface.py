"""What transformers hands to "ffpa" beside a plain mask, who may use it, and that everything can be undone."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tiny_transformers as tiny
import torch
import transformers
from torch.nn import functional as F
from transformers import masking_utils

import ffpa_hf
from ffpa_hf import settings
from ffpa_hf.dispatch import Route
from ffpa_hf.masks import RowIntervals
from ffpa_hf.patches import attention_interface, interval_mask, mask_recognition
from ffpa_hf.patches import transformers as patch
from ffpa_hf.patches.attention_interface import ffpa_attention_forward, ffpa_mask

MASKS = masking_utils.AttentionMaskInterface


@pytest.fixture(autouse=True)
def _fresh_warnings():
    attention_interface._warned.clear()


def tensors(q_heads=4, kv_heads=2, q_len=6, kv_len=6, batch=2, dim=8, value_dim=None):
    query = torch.randn(batch, q_heads, q_len, dim)
    return query, torch.randn(batch, kv_heads, kv_len, dim), torch.randn(batch, kv_heads, kv_len, value_dim or dim)


def expected(query, key, value, keep=None, scale=None, bias=None, softcap=None, sinks=None):
    """Attention written out, `[B, Q, H, Dv]`; rows that see nothing give zeros."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    scores = scores if keep is None else scores.masked_fill(~keep, float("-inf"))
    if sinks is not None:
        sinks = sinks.view(1, -1, 1, 1) if sinks.dim() == 1 else sinks
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2)


def attention(*arguments, module=None, **kwargs):
    out, weights = ffpa_attention_forward(module or torch.nn.Module(), *arguments, **kwargs)
    assert weights is None and out.is_contiguous()
    return out


def causal_mask(q_len=6, kv_len=6, batch=2, offset=0, padding=None, function=masking_utils.causal_mask_function):
    return ffpa_mask(
        batch_size=batch,
        q_length=q_len,
        kv_length=kv_len,
        q_offset=offset,
        mask_function=function,
        attention_mask=padding,
    )


def lower(q_len=6, kv_len=6, diagonal=0):
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril(diagonal)


# --- the attention function -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [None, 1.0, 0.3])
@pytest.mark.parametrize("value_dim", [8, 12])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_heads_scale_and_value_width(kv_heads, value_dim, scaling):
    q, k, v = tensors(kv_heads=kv_heads, value_dim=value_dim)
    out = attention(q, k, v, causal_mask(), scaling=scaling, dropout=0.0)
    torch.testing.assert_close(out, expected(q, k, v, lower(), scaling))


@pytest.mark.parametrize(
    ("kwarg", "attribute", "causal"), [(None, None, 1), (None, False, 0), (False, True, 0), (True, False, 1)]
)
def test_without_a_mask_causality_follows_sdpa(kwarg, attribute, causal):
    module = torch.nn.Module()
    if attribute is not None:
        module.is_causal = attribute
    q, k, v = tensors()
    out = attention(q, k, v, None, module=module, is_causal=kwarg)
    torch.testing.assert_close(out, expected(q, k, v, lower() if causal else None))
    one = attention(q[:, :, :1], k, v, None, module=module, is_causal=kwarg)  # a single row sees every key
    torch.testing.assert_close(one, expected(q[:, :, :1], k, v))


def test_every_argument_by_keyword():
    q, k, v = tensors()
    out, _ = ffpa_attention_forward(module=torch.nn.Module(), query=q, key=k, value=v, attention_mask=causal_mask())
    torch.testing.assert_close(out, expected(q, k, v, lower()))


def test_masks_of_a_whole_static_cache_are_cut_to_the_keys():
    q, k, v = tensors(q_len=2, kv_len=5)
    mask = causal_mask(2, 9, offset=3)
    torch.testing.assert_close(attention(q, k, v, mask), expected(q, k, v, lower(2, 5, 3)))
    with pytest.raises(ValueError, match="attn_mask has shape"):  # a user's mask is not cut: it may be off by one
        attention(q, k, v, mask.dense())


def test_rows_without_keys_give_zeros_and_finite_gradients():
    q, k, v = (t.requires_grad_() for t in tensors())
    padding = torch.tensor([[1] * 6, [0, 0, 0, 1, 1, 1]], dtype=torch.bool)
    out = attention(q, k, v, causal_mask(padding=padding))
    assert (out[1, :3] == 0).all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v)) and (q.grad[1, :, :3] == 0).all()


def test_queries_may_have_one_batch_beside_many():
    q, k, v = tensors(batch=3)
    torch.testing.assert_close(
        attention(q[:1], k, v, None, is_causal=False), expected(q[:1].expand(3, -1, -1, -1), k, v)
    )


def test_the_window_is_used_where_no_mask_was_built():
    q, k, v = tensors()
    band = lower() & ~lower(diagonal=-3)
    torch.testing.assert_close(attention(q, k, v, None, sliding_window=3), expected(q, k, v, band))
    torch.testing.assert_close(attention(q, k, v, causal_mask(), sliding_window=3), expected(q, k, v, lower()))
    both = lower(diagonal=2) & ~lower(diagonal=-3)
    out = attention(q, k, v, None, sliding_window=2, is_causal=False)
    torch.testing.assert_close(out, expected(q, k, v, both))
    one = attention(q[:, :, -1:], k, v, None, sliding_window=3)
    torch.testing.assert_close(one, expected(q[:, :, -1:], k, v, torch.arange(6) >= 3))


@pytest.mark.parametrize("mask", ["none", "plain", "padded", "bool", "additive"])
def test_position_bias_is_added_and_learns(mask):
    q, k, v = tensors()
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)
    padding = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    keep = lower() & padding[:, None, None] if mask in ("padded", "bool", "additive") else lower()
    given = {
        "none": None,
        "plain": causal_mask(),
        "padded": causal_mask(padding=padding),
        "bool": keep,
        "additive": torch.zeros(keep.shape).masked_fill(~keep, float("-inf")),
    }[mask]
    out = attention(q, k, v, given, position_bias=bias)
    wanted = expected(q, k, v, keep, bias=bias)
    torch.testing.assert_close(out, wanted)
    (grad,) = torch.autograd.grad(out.square().sum(), bias)
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), bias)
    assert grad.abs().max() > 0
    torch.testing.assert_close(grad, wanted_grad)


@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_sinks_and_softcap_are_honoured_with_gradients(name):
    q, k, v = tensors()
    sinks = torch.randn(4, requires_grad=True)
    out = attention(q, k, v, causal_mask(), softcap=2.0, **{name: sinks})
    wanted = expected(q, k, v, lower(), softcap=2.0, sinks=sinks)
    torch.testing.assert_close(out, wanted)
    (grad,) = torch.autograd.grad(out.square().sum(), sinks)
    torch.testing.assert_close(grad, torch.autograd.grad(wanted.square().sum(), sinks)[0])


@pytest.mark.parametrize("batch", [1, 2])
def test_sinks_of_each_query_are_honoured_with_gradients(batch):
    q, k, v = (tensor.requires_grad_() for tensor in tensors())
    sinks = torch.randn(batch, 4, 6, 1, requires_grad=True)
    out = attention(q, k, v, causal_mask(), softcap=2.0, sinks=sinks)
    wanted = expected(q, k, v, lower(), softcap=2.0, sinks=sinks)
    torch.testing.assert_close(out, wanted)
    weights = torch.randn_like(out)
    for given, right in zip(
        torch.autograd.grad((out * weights).sum(), (q, k, v, sinks)),
        torch.autograd.grad((wanted * weights).sum(), (q, k, v, sinks)),
        strict=True,
    ):
        torch.testing.assert_close(given, right)


def test_queries_without_keys_give_zeros_beside_a_sink_of_their_own():
    q, k, v = tensors()
    nothing = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    assert not attention(q, k, v, nothing, sinks=torch.randn(2, 4, 6, 1)).any()


def test_sinks_of_other_shapes_are_refused():
    with pytest.raises(NotImplementedError, match="one logit per query head"):
        attention(*tensors(), causal_mask(), sinks=torch.randn(2, 4, 5, 1))


def test_a_model_whose_sinks_differ_from_query_to_query_equals_eager():
    inkling = pytest.importorskip("transformers.models.inkling2", reason="newer than this transformers")
    config = inkling.Inkling2TextConfig(
        vocab_size=64, unpadded_vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16,
        sliding_window_size=5, rel_extent=5, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = inkling.Inkling2ForCausalLM(config).eval()
    tokens = torch.randint(3, 64, (2, 12))
    found = {}
    for name in ("eager", "ffpa"):
        model.set_attn_implementation(name)
        model.zero_grad()
        logits = model(input_ids=tokens, use_cache=False).logits
        logits.float().square().mean().backward()
        found[name] = [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(found["ffpa"]) == len(found["eager"]) > 10
    for given, right in zip(found["ffpa"], found["eager"], strict=True):
        torch.testing.assert_close(given, right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("form", ["intervals", "bool", "additive"])
def test_indices_choose_keys(form):
    q, k, v = tensors()
    mask = causal_mask()
    mask = {
        "intervals": mask,
        "bool": mask.dense(),
        "additive": torch.zeros(2, 1, 6, 6).masked_fill(~mask.dense(), -1e9),
    }[form]
    indices = torch.stack([torch.randperm(6)[:3] for _ in range(12)]).view(2, 6, 3).int()
    indices[0, 0, 0] = -1
    keep = torch.zeros(2, 6, 6, dtype=torch.bool)
    for b in range(2):
        for row in range(6):
            for index in indices[b, row].tolist():
                if index >= 0:
                    keep[b, row, index] = True
    keep = keep[:, None] & lower()
    wanted = expected(q, k, v, keep)
    seen = keep.any(-1).expand(2, 4, 6).transpose(1, 2) | (form != "additive")  # -1e9 rows average instead
    torch.testing.assert_close(attention(q, k, v, mask, indices=indices)[seen], wanted[seen])


def test_choosing_keys_before_documents_are_known_is_refused():
    q, k, v = tensors(batch=1)
    edges = torch.tensor([0, 2, 6], dtype=torch.int32)
    pack = {"indices": torch.zeros(1, 6, 1).int(), "cu_seq_lens_q": edges}
    for mask in (None, causal_mask(batch=1)):
        with pytest.raises(NotImplementedError, match="use_cache=False"):
            attention(q, k, v, mask, **pack)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    packed = masking_utils.packed_sequence_mask_function(masking_utils.find_packed_sequence_indices(positions))
    known = causal_mask(batch=1, function=masking_utils.and_masks(masking_utils.causal_mask_function, packed))
    for mask in (known, known.dense(), known[:, :, :]):
        out = attention(q, k, v, mask, **pack)
        assert (out[:, 2:] == 0).all() and (out[:, :2] != 0).any()  # the chosen key belongs to the first document


def test_block_indices_choose_blocks_of_keys_per_group_of_heads():
    q, k, v = tensors()
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 4
    blocks = torch.tensor([0, 1]).view(1, 2, 1, 1).expand(2, 2, 6, 1)  # the first two heads see block 0, others block 1
    keep = torch.zeros(1, 4, 6, 6, dtype=torch.bool)
    keep[:, :2, :, :4], keep[:, 2:, :, 4:] = True, True
    out = attention(q, k, v, causal_mask(), module=module, block_indices=blocks)
    torch.testing.assert_close(out, expected(q, k, v, keep & lower()))
    with pytest.raises(NotImplementedError, match="block_indices"):
        attention(q, k, v, causal_mask(), block_indices=blocks)
    edges = torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="row of its own"):
        attention(q, k, v, causal_mask(), module=module, block_indices=blocks, cu_seq_lens_q=edges)


def test_documents_are_separate_for_queries_cut_from_the_front():
    q, k, v = tensors(batch=1)
    edges = torch.tensor([0, 2, 6], dtype=torch.int32)
    document = torch.tensor([0, 0, 1, 1, 1, 1])
    keep = lower() & (document[:, None] == document)
    wanted = expected(q, k, v, keep)
    for rows in (6, 3):
        mask = causal_mask(batch=1)[:, :, -rows:]
        out = attention(q[:, :, -rows:], k, v, mask, cu_seq_lens_q=edges, cu_seq_lens_k=edges, max_length_q=4)
        torch.testing.assert_close(out, wanted[:, -rows:])


def test_documents_in_a_static_cache_with_room_left():
    q, k, v = tensors(batch=1, kv_len=9)
    edges = torch.tensor([0, 2, 6], dtype=torch.int32)
    document = torch.tensor([0, 0, 1, 1, 1, 1])
    keep = F.pad(lower() & (document[:, None] == document), (0, 3))
    out = attention(q, k, v, causal_mask(kv_len=9, batch=1, offset=torch.tensor(0)), cu_seq_lens_q=edges)
    torch.testing.assert_close(out, expected(q, k, v, keep))


def test_text_documents_do_not_cut_a_tower_that_is_not_causal():
    q, k, v = tensors(batch=1)
    edges = torch.tensor([0, 2, 6], dtype=torch.int32)
    out = attention(q, k, v, None, is_causal=False, cu_seq_lens_q=edges, cu_seq_lens_k=edges)
    torch.testing.assert_close(out, expected(q, k, v))


def test_documents_need_a_batch_of_one():
    with pytest.raises(ValueError, match="batch of one"):
        attention(*tensors(), causal_mask(), cu_seq_lens_q=torch.tensor([0, 6], dtype=torch.int32))


def test_strides_reach_the_kernels_untouched(monkeypatch):
    seen = {}

    def spy(query, key, value, **_):
        seen.update(query=query, key=key, value=value)
        return query

    monkeypatch.setattr(attention_interface, "attend", spy)
    q, k, v = (torch.randn(2, 6, 2, 8).transpose(1, 2) for _ in range(3))
    attention(q, k, v, causal_mask())
    assert seen["query"] is q and seen["key"] is k and seen["value"] is v


def test_plain_masks_reach_the_kernels_as_no_mask(monkeypatch):
    calls = []
    monkeypatch.setattr(attention_interface, "attend", lambda q, *_, **kw: calls.append(kw) or q)
    q, k, v = tensors()
    attention(q, k, v, causal_mask())
    attention(q[:, :, :1], k, v, causal_mask(1, 6, offset=5))
    assert [(call["attn_mask"], call["is_causal"]) for call in calls] == [(None, True), (None, False)]


def test_a_two_dimensional_mask_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 6\)"):
        attention(*tensors(), torch.ones(2, 6, dtype=torch.bool))


def test_paged_attention_and_head_masks_are_refused():
    with pytest.raises(NotImplementedError, match="continuous batching"):
        attention(*tensors(), None, read_index=torch.arange(3))
    with pytest.raises(NotImplementedError, match="head_mask"):
        attention(*tensors(), None, head_mask=torch.ones(4))


def test_asking_for_weights_warns_once():
    with pytest.warns(UserWarning, match="output_attentions"):
        attention(*tensors(), causal_mask(), output_attentions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*tensors(), causal_mask(), output_attentions=True)


@pytest.mark.parametrize("class_name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_whole_models_warn_when_asked_for_weights(class_name):
    model_class = getattr(transformers, class_name)  # GPT-2 does not hand the wish to its attention
    config = model_class.config_class(**SMALL, intermediate_size=24, n_embd=16, n_layer=1, n_head=2)
    model = model_class._from_config(config, attn_implementation="ffpa").eval()
    with pytest.warns(UserWarning, match="records none"):
        assert not model(torch.ones(1, 4, dtype=torch.long), output_attentions=True).attentions
    attention_interface._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(torch.ones(1, 4, dtype=torch.long))


# --- other architectures ----------------------------------------------------------------------------------------------


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}


def _pair(make, inputs, keep=None, **call):
    """Output and gradients of the same weights under "ffpa" and "eager"."""
    results = []
    for implementation in ("ffpa", "eager"):
        torch.manual_seed(0)
        model = make(implementation).eval()
        out = model(**inputs, **call)
        out = out.logits if "logits" in out else out.last_hidden_state
        out = out if keep is None else out[keep]
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append((out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (out, grads), (wanted, wanted_grads) = results
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    for name, grad in wanted_grads.items():
        error = (grads[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-6)
        assert error < 1e-4, f"{name}: {error:.1e}"


def _made(class_name, config):
    return lambda implementation: getattr(transformers, class_name)._from_config(
        copy.deepcopy(config), attn_implementation=implementation
    )


def test_t5_learns_its_position_bias():
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    inputs = tiny.batch("right")
    inputs = {"input_ids": inputs["input_ids"] % 32, "attention_mask": inputs["attention_mask"]}
    _pair(_made("T5ForConditionalGeneration", config), inputs, decoder_input_ids=torch.randint(1, 32, (2, 5)))


def test_encoders_see_both_ways():
    inputs = tiny.batch("right")
    inputs = {"input_ids": inputs["input_ids"] % 32, "attention_mask": inputs["attention_mask"]}
    keep = inputs["attention_mask"].bool()
    bert = transformers.BertConfig(intermediate_size=24, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SMALL)
    _pair(_made("BertModel", bert), inputs, keep)
    modern = transformers.ModernBertConfig(
        intermediate_size=24, local_attention=4, global_attn_every_n_layers=2, **{**SMALL, "num_attention_heads": 2}
    )
    _pair(_made("ModernBertModel", modern), inputs, keep)


def test_whisper_crosses_from_text_to_sound():
    config = transformers.WhisperConfig(
        vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=10,
        pad_token_id=0, decoder_start_token_id=1, dropout=0.0,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": torch.randint(1, 32, (2, 5))}
    _pair(_made("WhisperForConditionalGeneration", config), inputs)


def test_values_narrower_than_keys():
    config = transformers.DeepseekV3Config(
        intermediate_size=24, moe_intermediate_size=16, num_key_value_heads=2, n_routed_experts=4, n_group=1,
        topk_group=1, num_experts_per_tok=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=2, **SMALL,
    )  # fmt: skip
    inputs = tiny.batch("left")
    inputs = {"input_ids": inputs["input_ids"] % 32, "attention_mask": inputs["attention_mask"]}
    _pair(_made("DeepseekV3ForCausalLM", config), inputs, inputs["attention_mask"].bool())


def test_selected_keys_are_honoured():
    config = transformers.DeepseekV32Config(
        intermediate_size=24, moe_intermediate_size=16, num_key_value_heads=2, n_routed_experts=4, n_group=1,
        topk_group=1, num_experts_per_tok=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=2, index_topk=3, index_n_heads=2, index_head_dim=16, **SMALL,
    )  # fmt: skip
    _pair(_made("DeepseekV32ForCausalLM", config), {"input_ids": tiny.batch()["input_ids"] % 32})


# --- enable and disable -----------------------------------------------------------------------------------------------


def _state(model):
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    return [config._attn_implementation for config in configs.values()], attributes


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_enable_and_disable_are_a_round_trip(implementation):
    model = tiny.model("gemma4", implementation)
    before = _state(model)
    assert ffpa_hf.enable(model, backend="sdpa") is model
    assert model.config._attn_implementation == "ffpa"
    model(**tiny.batch())
    assert {row.backend for row in ffpa_hf.report(model)} == {"sdpa"}
    ffpa_hf.disable(model)
    assert _state(model) == before
    ffpa_hf.disable(model)  # a second time finds nothing to undo
    assert _state(model) == before


def test_each_model_keeps_its_own_route():
    one, other = tiny.model("llama"), tiny.model("llama")
    ffpa_hf.enable(one, backend="triton", strict=True)
    ffpa_hf.enable(other, backend="sdpa")
    routes = [m.model.layers[0].self_attn._ffpa_route for m in (one, other)]
    assert routes == [Route("triton", strict=True), Route("sdpa")]
    # Triton cannot, and strict means it; what it names first depends on whether the interpreter takes fp32 on a CPU.
    with pytest.raises((TypeError, ValueError), match="head_dim 8|query dtype float32"):
        with settings.override(force_no_sdpa_fallback=True):
            one(**tiny.batch())
    other(**tiny.batch())
    ffpa_hf.enable(one, backend="sdpa")  # a second request replaces the first
    one(**tiny.batch())
    ffpa_hf.disable(one)
    assert one.config._attn_implementation == "eager"


def test_a_copy_of_an_enabled_model_can_be_disabled():
    model = tiny.model("llama", "sdpa")
    ffpa_hf.enable(model, backend="sdpa")
    twin = copy.deepcopy(model)
    ffpa_hf.disable(twin)
    assert twin.config._attn_implementation == "sdpa" and model.config._attn_implementation == "ffpa"
    assert not hasattr(twin.model.layers[0].self_attn, "_ffpa_route")
    assert model.model.layers[0].self_attn._ffpa_route == Route("sdpa")


def test_an_option_of_diffusers_is_refused_by_name():
    model = tiny.model("llama")
    with pytest.raises(TypeError, match="no option 'fuse_qkv' for transformers models; it has backend.*towers"):
        ffpa_hf.enable(model, fuse_qkv=True)
    assert not ffpa_hf.report(model).rows and model.config._attn_implementation == "eager"


def test_enabled_is_a_block():
    model = tiny.model("llama", "eager")
    with pytest.raises(KeyError), ffpa_hf.enabled(model):
        assert model.config._attn_implementation == "ffpa"
        raise KeyError
    assert model.config._attn_implementation == "eager"


def _gemma3_with_images():
    text = tiny.config("gemma3").to_dict()
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=5, boi_token_index=6,
        eoi_token_index=7,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()


def test_towers_that_gain_nothing_keep_what_they_had_and_are_named():
    model = _gemma3_with_images()
    before = _state(model)
    ffpa_hf.enable(model)
    assert model.config.text_config._attn_implementation == "ffpa"
    assert model.config.vision_config._attn_implementation == "sdpa"
    named = {row.module_name: row.reason for row in ffpa_hf.report(model)}
    assert any("vision_tower" in name and "towers=True" in reason for name, reason in named.items())
    ffpa_hf.disable(model)
    assert _state(model) == before
    ffpa_hf.enable(model, towers=True)
    assert model.config.vision_config._attn_implementation == "ffpa"


def test_towers_that_cannot_be_served_are_named():
    audio = transformers.Gemma4AudioConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    config = transformers.Gemma4Config(
        text_config=tiny.config("gemma4"), audio_config=audio, image_token_id=60, video_token_id=61, audio_token_id=62
    )
    config.vision_config = None
    model = transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager")
    before = _state(model)
    ffpa_hf.enable(model, towers=True)
    assert model.config.audio_config._attn_implementation == "eager"
    named = {row.module_name: row.reason for row in ffpa_hf.report(model)}
    assert "itself" in named["model.audio_tower"]
    ffpa_hf.disable(model)
    assert _state(model) == before


@pytest.mark.parametrize("towers", [False, True])
def test_images_in_text_attend_both_ways(towers):
    model = _gemma3_with_images()
    tokens = torch.tensor([[2, 6, 5, 5, 5, 5, 7, 9, 10, 6, 5, 5, 5, 5, 7, 3]])
    inputs = {
        "input_ids": tokens,
        "token_type_ids": (tokens == 5).long(),
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(2, 3, 8, 8),
    }
    with torch.no_grad():
        wanted = model(**inputs).logits
        with ffpa_hf.enabled(model, towers=towers):
            torch.testing.assert_close(model(**inputs).logits, wanted, rtol=1e-4, atol=1e-5)
            served = {row.shape for row in ffpa_hf.report(model) if row.calls and "language_model" in row.module_name}
    assert all("intervals" in shape for shape in served)


def test_encoder_and_decoder_of_one_config_class_are_both_enabled():
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    )
    before = _state(model)
    ffpa_hf.enable(model)
    assert model.encoder.config._attn_implementation == model.decoder.config._attn_implementation == "ffpa"
    model(input_ids=torch.randint(1, 32, (1, 4)), decoder_input_ids=torch.randint(1, 32, (1, 3)))
    assert len({row.module_name for row in ffpa_hf.report(model) if row.calls}) == 3
    ffpa_hf.disable(model)
    assert _state(model) == before


def test_a_wrapped_model_is_found():
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny.model("llama", "sdpa")

    wrapper = Wrapper()
    ffpa_hf.enable(wrapper, backend="sdpa")
    assert wrapper.inner.config._attn_implementation == "ffpa"
    ffpa_hf.disable(wrapper)
    assert wrapper.inner.config._attn_implementation == "sdpa"


def test_models_that_cannot_be_served_are_refused():
    options = {"d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2, "vocab_size": 32}
    model = transformers.XGLMForCausalLM(transformers.XGLMConfig(**options))
    with pytest.raises(ValueError, match="computes its attention itself"):
        ffpa_hf.enable(model)
    with pytest.raises(TypeError):
        ffpa_hf.enable(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="no option .twoers. for transformers"):
        ffpa_hf.enable(tiny.model("llama"), twoers=True)


def test_every_dispatching_class_of_transformers_is_recognised_by_its_methods():
    """A sample of families with unlike ways to reach the registry."""
    names = {
        "llama.LlamaAttention", "gemma4.Gemma4TextAttention", "gemma4.Gemma4VisionAttention", "gpt2.GPT2Attention",
        "t5.T5Attention", "whisper.WhisperAttention", "bert.BertSelfAttention", "modernbert.ModernBertAttention",
        "kosmos2_5.Kosmos2_5VisionAttention", "siglip.SiglipAttention",
    }  # fmt: skip
    for name in names:
        model, cls = name.split(".")
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        assert patch._class_dispatches(getattr(module, cls)), name
    gemma4 = importlib.import_module("transformers.models.gemma4.modeling_gemma4")
    git = importlib.import_module("transformers.models.git.modeling_git")
    assert not patch._class_dispatches(gemma4.Gemma4AudioAttention) and not patch._class_dispatches(
        git.GitSelfAttention
    )


def test_interval_masks_survive_accelerate():
    accelerate = pytest.importorskip("accelerate")
    mask = causal_mask()
    moved = accelerate.utils.send_to_device({"mask": mask}, "cpu")["mask"]
    assert isinstance(moved, interval_mask.IntervalMask)
    meta = accelerate.utils.send_to_device(mask, "meta")
    assert isinstance(meta, interval_mask.IntervalMask) and meta.device.type == "meta"


def _intervals_seen(monkeypatch):
    seen = []
    monkeypatch.setattr(
        attention_interface,
        "attend",
        lambda *a, attn_mask, _attend=attention_interface.attend, **kw: (
            seen.append((type(attn_mask), attn_mask.device.type)) or _attend(*a, attn_mask=attn_mask, **kw)
        ),
    )
    return seen


@pytest.mark.parametrize("way", ["cpu offload", "align device hooks", "dispatched"])
def test_masks_reach_layers_that_accelerate_hooks(way, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    model, inputs = tiny.model("mistral", "ffpa"), tiny.batch("left")
    wanted = model(**inputs).logits
    if way == "cpu offload":
        model = accelerate.cpu_offload(model, execution_device="cpu")
    elif way == "align device hooks":
        for layer in model.model.layers:
            hook = accelerate.hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True, offload=True)
            accelerate.hooks.add_hook_to_module(layer, hook)
    else:
        model = accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    seen = _intervals_seen(monkeypatch)
    assert torch.equal(model(**inputs).logits, wanted)
    assert seen == [(RowIntervals, "cpu")] * 2


def test_sharded_data_parallel_training_is_that_of_one_process(tmp_path):
    """FSDP2 over two processes: masks pass its hooks and its casts of the inputs as intervals."""
    script = Path(__file__).parent / "fsdp_script.py"
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path / "rendezvous")], stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=500)
        assert rank.returncode == 0, errors.decode()[-2000:]


def test_one_tensor_as_key_and_value_learns_from_both():
    """deepseek_v4 hands over the same tensor twice."""
    query, shared, _ = tensors(kv_heads=1)
    shared.requires_grad_()
    out = attention(query, shared, shared, causal_mask())
    wanted = expected(query, shared, shared.clone(), lower())
    torch.testing.assert_close(out, wanted)
    grads = [torch.autograd.grad(each.square().sum(), shared)[0] for each in (out, wanted)]
    torch.testing.assert_close(*grads)


def test_lora_trains_through_ours():
    peft = pytest.importorskip("peft")
    losses = []
    for implementation in ("ffpa", "eager"):
        model = tiny.model("gemma4", implementation)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "k_proj"], r=2))
        if implementation == "ffpa":
            assert patch.owns(model)
        optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
        tokens = tiny.batch("right")
        steps = []
        for _ in range(3):
            loss = model(**tokens, labels=tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0][0] > losses[0][-1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_gemma4_images_are_recognised_in_its_sliding_layers(padded, monkeypatch):
    text = tiny.config("gemma4", use_bidirectional_attention="vision")
    config = transformers.Gemma4Config(text_config=text, image_token_id=60, video_token_id=61, audio_token_id=62)
    config.vision_config = config.audio_config = None
    inputs = tiny.batch("left" if padded else "none", length=14)
    inputs["input_ids"] = inputs["input_ids"].clamp(max=59)
    inputs["mm_token_type_ids"] = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]]).expand(2, -1)
    logits = {}
    for implementation in ("eager", "ffpa"):
        torch.manual_seed(0)
        model = transformers.Gemma4ForConditionalGeneration._from_config(
            copy.deepcopy(config), attn_implementation=implementation
        ).eval()
        if implementation == "ffpa":
            monkeypatch.setattr(mask_recognition, "evaluate", lambda *_: pytest.fail("evaluated"))
        with torch.no_grad():
            logits[implementation] = model(**inputs, use_cache=False).logits
    keep = inputs.get("attention_mask", torch.ones(2, 14)).bool()
    torch.testing.assert_close(logits["ffpa"][keep], logits["eager"][keep], rtol=1e-4, atol=1e-5)


def test_paligemma_reads_its_prefix_both_ways(monkeypatch):
    text = transformers.GemmaConfig(head_dim=16, intermediate_size=24, num_key_value_heads=1, **SMALL)
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_id=31, projection_dim=16, hidden_size=16
    )
    tokens = torch.tensor([[31, 31, 31, 31, 3, 4, 5, 6, 7], [31, 31, 31, 31, 8, 9, 10, 0, 0]])
    inputs = {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "token_type_ids": torch.tensor([[0] * 6 + [1] * 3, [0] * 5 + [1] * 2 + [0] * 2]),
        "pixel_values": torch.randn(2, 3, 8, 8),
        "labels": tokens.masked_fill(tokens == 0, -100),
    }
    out = {}
    for implementation in ("eager", "ffpa"):
        torch.manual_seed(0)
        model = transformers.PaliGemmaForConditionalGeneration._from_config(
            copy.deepcopy(config), attn_implementation=implementation
        ).train()
        if implementation == "ffpa":
            monkeypatch.setattr(mask_recognition, "evaluate", lambda *_: pytest.fail("evaluated"))
        out[implementation] = model(**inputs)
    keep = inputs["attention_mask"].bool()
    torch.testing.assert_close(out["ffpa"].logits[keep], out["eager"].logits[keep], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out["ffpa"].loss, out["eager"].loss)


def test_models_on_one_config_share_its_switch_and_get_it_back():
    from transformers import LlamaModel

    config = tiny.model("llama", "sdpa").config
    one, other = LlamaModel(config), LlamaModel(config)
    assert one.config is other.config
    before = config._attn_implementation
    ffpa_hf.enable(one)
    ffpa_hf.enable(other)
    ffpa_hf.disable(one)
    assert config._attn_implementation == "ffpa"  # the other one still wants it
    ffpa_hf.disable(other)
    assert config._attn_implementation == before
