"""Every family of transformers_families.py in every way to call it: "ffpa" and "sdpa" against "eager".

Compares logits, gradients of every parameter, and greedy tokens. The tests, the script that runs the sweep for another
release and the table in docs/transformers.md all use what stands here.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tiny_transformers as tiny
import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers_families import FAMILIES, Family

#: How far a logit may be off (relative, absolute), and a gradient, relative to the largest of its parameter.
LOGITS, GRADIENTS = (2e-4, 2e-5), 1e-4

OK = "ok"


@dataclass
class Seen:
    """What a model gave: logits of the tokens that exist, gradients of a loss over them, greedy tokens."""

    logits: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    tokens: list[Tensor] = field(default_factory=list)


Way = Callable[[Any, Family, bool], Seen]  # model, its family, whether this is the reference -> what it gave


# --- ways to call a model ---------------------------------------------------------------------------------------------


def _run(model: Any, calls: list[dict[str, Any]], keep: Tensor | None = None) -> Seen:
    """Forward and backward; several calls (the documents of a pack, apart) make one row of logits."""
    model.zero_grad()
    logits = torch.cat([model(**call).logits for call in calls], dim=1)
    logits = logits if keep is None else logits[keep]
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return Seen([logits.detach()], {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def _padded(padding: str, model: Any, family: Family, reference: bool) -> Seen:
    inputs = family.inputs(padding)
    mask = inputs.get("decoder_attention_mask" if family.kind == "speech" else "attention_mask")
    keep = None if mask is None or family.kind == "seq2seq" else mask.bool()
    return _run(model, [{**inputs, **_no_cache(family)}], keep)


def _no_cache(family: Family) -> dict[str, bool]:
    return {} if family.kind == "encoder" else {"use_cache": False}


def _checkpointed(model: Any, family: Family, reference: bool) -> Seen:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in later releases
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        try:
            return _padded("right", model, family, reference)
        finally:
            model.gradient_checkpointing_disable()
            model.eval()


def _four_dimensional(form: str, model: Any, family: Family, reference: bool) -> Seen:
    generator = torch.Generator().manual_seed(3)
    keep = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril() & (torch.rand(2, 1, 11, 11, generator=generator) > 0.2)
    keep |= torch.eye(11, dtype=torch.bool)
    mask = keep if form == "bool" and not reference else torch.zeros(keep.shape).masked_fill(~keep, _lowest())
    return _run(model, [{"input_ids": tiny.batch()["input_ids"], "attention_mask": mask, **_no_cache(family)}])


def _lowest() -> float:
    return torch.finfo(torch.float32).min


SIZES = (4, 3, 6)


def _packed(by: str, cache: bool, model: Any, family: Family, reference: bool) -> Seen:
    """Three documents in one row; the reference reads each alone."""
    tokens = torch.randint(2, tiny.VOCAB, (1, sum(SIZES)), generator=torch.Generator().manual_seed(2))
    if reference:
        return _run(model, [{"input_ids": part, **_no_cache(family)} for part in tokens.split(SIZES, dim=1)])
    positions = torch.cat([torch.arange(n) for n in SIZES])[None] + family.first_position
    call: dict[str, Any] = {"input_ids": tokens, "position_ids": positions}
    call |= {"use_cache": True} if cache else _no_cache(family)
    if by == "lengths":
        edges = torch.tensor([0, *torch.tensor(SIZES).cumsum(0).tolist()], dtype=torch.int32)
        call |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 6, "max_length_k": 6}
    return _run(model, [call])


def _generated(options: dict[str, Any], model: Any, family: Family, reference: bool) -> Seen:
    seen = Seen()
    for padding in family.generates:
        inputs = {k: v for k, v in family.inputs(padding).items() if k not in ("decoder_input_ids", "token_type_ids")}
        inputs = {k: v for k, v in inputs.items() if k != "decoder_attention_mask"}
        if family.kind == "images" and "token_type_ids" in family.inputs(padding):
            inputs["token_type_ids"] = family.inputs(padding)["token_type_ids"]
        if "input_ids" in inputs:
            inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
        given = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
        seen.tokens.append(model.generate(**inputs, **given))
    return seen


STATIC, CHUNKS = {"cache_implementation": "static"}, {"prefill_chunk_size": 4}

WAYS: dict[str, Way] = {
    "no padding": functools.partial(_padded, "none"),
    "left padding": functools.partial(_padded, "left"),
    "right padding": functools.partial(_padded, "right"),
    "holes": functools.partial(_padded, "holes"),
    "checkpointing": _checkpointed,
    "4-D additive mask": functools.partial(_four_dimensional, "additive"),
    "4-D bool mask": functools.partial(_four_dimensional, "bool"),
    "packed, position_ids": functools.partial(_packed, "positions", False),
    "packed, cu_seq_lens": functools.partial(_packed, "lengths", False),
    "packed, cu_seq_lens, cache": functools.partial(_packed, "lengths", True),
    "generate, dynamic cache": functools.partial(_generated, {}),
    "generate, static cache": functools.partial(_generated, STATIC),
    "generate, dynamic cache, chunked prefill": functools.partial(_generated, CHUNKS),
    "generate, static cache, chunked prefill": functools.partial(_generated, {**STATIC, **CHUNKS}),
    "generate, beam search": functools.partial(_generated, {"num_beams": 3}),
}
_TRAINING = ["no padding", "left padding", "right padding", "holes", "checkpointing"]
_WAYS_OF = {
    "decoder": list(WAYS),
    "encoder": [*_TRAINING, "packed, cu_seq_lens"],
    "seq2seq": [*_TRAINING, "generate, dynamic cache", "generate, static cache", "generate, beam search"],
    "speech": [*_TRAINING, "generate, dynamic cache", "generate, static cache"],
    "images": [*_TRAINING, "generate, dynamic cache", "generate, static cache", "generate, beam search"],
}


# --- what cannot be compared ------------------------------------------------------------------------------------------

#: (families, ways, why): there is nothing to compare with, whatever the implementation.
NOT_COMPARED: tuple[tuple[str, str, str], ...] = (
    ("opt", "4-D .*", "counts its positions in the 2-D mask"),
    ("gpt2|opt|gpt_oss|granite_swa", "packed, position_ids", "never hands positions to its mask"),
    (".*_bidirectional", "packed, position_ids", "its mask hides where documents begin"),
    ("stablelm", "packed, cu_seq_lens, cache", "drops the lengths before its attention: pass use_cache=False"),
)
if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
    NOT_COMPARED += (("llama4", "packed, position_ids", "this release counts chunks from the start of the pack"),)

#: (families, ways): "ffpa" says no, with an error that tells what to do instead. These models choose keys of their own
#: before the lengths of documents are known, or by position across them.
REFUSED: tuple[tuple[str, str], ...] = (("deepseek_v32", "packed, cu_seq_lens, cache"), ("minimax_m3", "packed, .*"))

#: (families, ways, error): where transformers' own "eager" fails in some release.
EAGER_FAILS: tuple[tuple[str, str, str], ...] = (
    ("gpt2|opt|mimo_v2_flash", "generate, static cache, chunked prefill", "RuntimeError"),
    ("deepseek_v4", "generate, static cache.*", "KeyError"),
    ("gemma4.*", "generate, static cache, chunked prefill", "AmbiguousGlobalPerLayerAttributeError"),
    ("llama4", "generate, static cache.*", "TypeError"),
)


def listed(table: tuple[tuple[str, ...], ...], family: str, way: str) -> tuple[str, ...] | None:
    """The row of one of the tables above that covers a case."""
    for row in table:
        if re.fullmatch(row[0], family) and re.fullmatch(row[1], way):
            return row
    return None


def is_right(family: str, way: str, result: str) -> bool:
    """Whether an outcome under "ffpa" is what it has to be: equal to eager, or an exception that stands above."""
    if result.startswith("not compared"):
        return True
    if listed(REFUSED, family, way) is not None:
        return result.startswith("raises: NotImplementedError")
    fails = listed(EAGER_FAILS, family, way)
    if result.startswith("eager raises"):
        return fails is not None and result.startswith(f"eager raises: {fails[2]}")
    return result == OK


def short(result: str) -> str:
    """An outcome without its numbers and messages, as it is recorded."""
    head, _, rest = result.partition(": ")
    return f"{head}: {rest.split(':')[0]}" if "raises" in head else head


def ways_of(family: str) -> list[str]:
    """The ways that make sense for a family."""
    return _WAYS_OF[FAMILIES[family].kind]


# --- the sweep --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def model(family: str, implementation: str) -> Any:
    """One model, kept for the ways that follow."""
    return FAMILIES[family].build(implementation)


@functools.lru_cache(maxsize=4)
def _reference(family: str, way: str) -> Seen | str:
    return _observed(family, way, "eager", True)


def _observed(family: str, way: str, implementation: str, reference: bool) -> Seen | str:
    torch.manual_seed(0)
    try:
        return WAYS[way](model(family, implementation), FAMILIES[family], reference)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def outcome(family: str, way: str, implementation: str) -> str:
    """ "ok", or what is wrong: "differs: ...", "raises: ...", "eager raises: ...", "not compared: ..."."""
    unfit = listed(NOT_COMPARED, family, way)
    if unfit is not None:
        return f"not compared: {unfit[2]}"
    wanted = _reference(family, way)
    if isinstance(wanted, str):
        return f"eager raises: {wanted}"
    given = _observed(family, way, implementation, False)
    return f"raises: {given}" if isinstance(given, str) else _difference(given, wanted)


def _difference(given: Seen, wanted: Seen) -> str:
    relative, absolute = LOGITS
    for ours, theirs in zip(given.logits, wanted.logits, strict=True):
        if not torch.allclose(ours, theirs, relative, absolute):
            return f"differs: logits by {(ours - theirs).abs().max():.1e}"
    for ours, theirs in zip(given.tokens, wanted.tokens, strict=True):
        if not torch.equal(ours, theirs):
            return "differs: tokens"
    if not given.grads.keys() >= wanted.grads.keys():
        return "differs: a parameter without a gradient"
    if wanted.grads:
        floor = 1e-3 * max(grad.abs().max() for grad in wanted.grads.values())  # biases of keys have only noise
        for name, theirs in wanted.grads.items():
            error = (given.grads[name] - theirs).abs().max() / torch.maximum(theirs.abs().max(), floor)
            if not error < GRADIENTS:
                return f"differs: gradient of {name} by {error:.1e}"
    return OK


def versions() -> dict[str, str]:
    """What a result depends on."""
    return {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
