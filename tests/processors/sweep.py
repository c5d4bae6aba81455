"""The sweep over diffusers' models: what `FFPAAttnProcessor` and `enable` do to each, against the model itself.

    python tests/processors/sweep.py            # examine every case, write docs/diffusers-models.json and the table
    python tests/processors/sweep.py Flux Wan   # examine the cases with these words in their names, write nothing

`test_sweep.py` runs the same on every case and compares with what is committed; a new release of diffusers is checked
by running this file under it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

import diffusers  # noqa: E402
import diffusers_models as tiny  # noqa: E402
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry  # noqa: E402
from sweep_models import CASES, Case  # noqa: E402

import ffpa_hf  # noqa: E402
from ffpa_hf import FFPAAttnProcessor  # noqa: E402
from ffpa_hf.processors import capture, inline, redirect  # noqa: E402
from ffpa_hf.report import reset  # noqa: E402

TOLERANCE = 1e-5
RECORD = ROOT / "docs" / "diffusers-models.json"
PAGE = ROOT / "docs" / "diffusers.md"
BEGIN, END = "<!-- sweep: made by tests/processors/sweep.py -->", "<!-- /sweep -->"


# --- running ----------------------------------------------------------------------------------------------------------


def run(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Every tensor that one forward returns, as one flat vector."""
    if "return_dict" in inspect.signature(model.forward).parameters:
        inputs = {**inputs, "return_dict": False}
    torch.manual_seed(1)
    with torch.no_grad():
        return torch.cat([tensor.flatten().float() for tensor in _tensors(model(**inputs))])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "latent_dist"):
        yield value.latent_dist.mode()


def snapshot(model: nn.Module) -> list[tuple[str, type, int, tuple[str, ...]]]:
    """What must come back: every module's class, its processor object, and the names on it."""
    return [
        (name, type(module), id(getattr(module, "processor", None)), tuple(vars(module)))
        for name, module in model.named_modules()
    ]


def served_calls(model: nn.Module) -> int:
    return sum(row.calls for row in ffpa_hf.report(model))


class _Silenced:
    """`attend` answering zeros: a model whose output stays the same would prove nothing."""

    def __enter__(self) -> None:
        self.attend = redirect.attend
        redirect.attend = lambda *args, **more: self.attend(*args, **more) * 0  # type: ignore[assignment]

    def __exit__(self, *_: Any) -> None:
        redirect.attend = self.attend


def examine(case: Case) -> dict[str, Any]:
    """Run one case every way; the record of it. Raises AssertionError where anything differs from the default."""
    model, inputs = case.make()
    ops = tiny.AttentionOps()
    with contextlib.nullcontext() if case.flex else ops:
        expected = run(model, inputs)
    assert torch.isfinite(expected).all() and expected.abs().max() > 0, "the tiny model itself is broken"
    before, keys = snapshot(model), list(model.state_dict())
    processors = [module.processor for module in model.modules() if capture.holds_processor(module)]

    calls = 0
    if processors:
        reset()
        shared = FFPAAttnProcessor()
        model.set_attn_processor(shared)
        error = (run(model, inputs) - expected).abs().max().item()
        assert error <= TOLERANCE, f"set_attn_processor: off by {error:.1e}"
        assert list(model.state_dict()) == keys, "set_attn_processor moved the state dict"
        assert set(vars(shared)) == {"route"}, "the shared processor holds state"
        calls = served_calls(model)
        ffpa_hf.disable(model)
        assert snapshot(model) == before, "disable did not give back what set_attn_processor replaced"

    record = {"class": case.class_name, "variant": case.variant, **_attention_of(case)}
    reset()
    ffpa_hf.enable(model)
    record["served"] = _served(model)
    error = (run(model, inputs) - expected).abs().max().item()
    assert error <= TOLERANCE, f"enable: off by {error:.1e}"
    assert list(model.state_dict()) == keys, "enable moved the state dict"
    enabled = served_calls(model)
    assert enabled >= calls, "enable reached less than set_attn_processor"
    if enabled:
        with _Silenced():
            silent = run(model, inputs)
        difference = (silent - expected).abs().max().item()
        assert not difference <= 100 * TOLERANCE, f"attention hardly matters here ({difference:.1e}): a poor test"
    ffpa_hf.disable(model)
    record["calls"] = {
        "computed": None if case.flex else ops.count,
        "set_attn_processor": calls,
        "set_attention_backend": _switched(model, inputs, expected),
        "enable": enabled,
    }
    assert snapshot(model) == before, "disable did not give back what enable replaced"
    assert torch.equal(run(model, inputs), expected), "disable left something behind"
    return record


def _switched(model: Any, inputs: dict[str, Any], expected: Tensor) -> int:
    """Calls that `set_attention_backend("ffpa")` brings us; the model is as before afterwards."""
    reset()
    model.set_attention_backend("ffpa")
    try:
        error = (run(model, inputs) - expected).abs().max().item()
        assert error <= TOLERANCE, f"set_attention_backend: off by {error:.1e}"
        return sum(row.calls for row in ffpa_hf.report())
    finally:
        model.reset_attention_backend()
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)  # diffusers' reset leaves it


# --- describing -------------------------------------------------------------------------------------------------------


def _attention_of(case: Case) -> dict[str, Any]:
    """Which processors a class has by default, and the head dims of the released configuration."""
    published, dims = case.published, set(case.head_dims)
    said = bool(dims)
    if published is None and case.variant:
        published = CASES[case.class_name].published
    if published is not None and not said:
        with torch.device("meta"):
            for module in case.model_class(**published).modules():
                reached = capture.holds_processor(module) or inline.has_inline_attention(module)
                if reached and (width := head_dim(module)) is not None:
                    dims.add(width)
    model = case.make()[0]
    kinds = set()
    for module in model.modules():
        if capture.holds_processor(module):
            kinds.add(type(module.processor).__name__)
        elif inline.has_inline_attention(module):
            kinds.add(f"{type(module).__name__}.forward")
    return {"default": sorted(kinds), "head_dims": sorted(dims)}


def head_dim(module: Any) -> int | None:
    """Width of one head, read from whatever the module calls it; None where it does not say."""
    for name in ("head_dim", "dim_head", "attention_head_dim"):
        if isinstance(getattr(module, name, None), int):
            return getattr(module, name)
    heads = next(
        (v for n in ("heads", "num_heads", "n_heads", "num_attention_heads") if (v := getattr(module, n, None))), 1
    )
    if isinstance(getattr(module, "inner_dim", None), int):
        return module.inner_dim // heads
    for name, parts in (("to_q", 1), ("to_query", 1), ("q", 1), ("to_qkv", 3), ("qkv", 3), ("to_kv", 2)):
        layer = getattr(module, name, None)
        width = getattr(layer, "out_features", None) or getattr(layer, "out_channels", None)
        if width:
            return width // parts // heads
    return None


def _served(model: nn.Module) -> dict[str, int]:
    """How each attention module of an enabled model is served: the way, or why not, and how many."""
    ways: dict[str, int] = {}
    reasons = {row.module_name: row.reason for row in ffpa_hf.report(model)}
    for name, module in model.named_modules():
        slot = capture.slot_of(module)
        if slot is not None:
            way = capture.how_served(slot)
        elif name in reasons:
            way = f"unchanged: {reasons[name]}"
        else:
            continue
        ways[way] = ways.get(way, 0) + 1
    return dict(sorted(ways.items()))


# --- record and page --------------------------------------------------------------------------------------------------


def table(records: list[dict[str, Any]]) -> str:
    """The record as a Markdown table."""
    lines = [
        f"{len({r['class'] for r in records})} model classes of diffusers {diffusers.__version__}, "
        f"{len(records)} configurations.",
        "",
        "| class | its own processor | served by | head dims |",
        "|---|---|---|---|",
    ]
    for r in sorted(records, key=lambda r: (r["class"], r["variant"])):
        name = f"{r['class']} ({r['variant']})" if r["variant"] else r["class"]
        dims = ", ".join(map(str, r["head_dims"])) or "any"
        lines.append(
            f"| {name} | {', '.join(r['default']) or '-'} | {'; '.join(_short(w) for w in r['served'])} | {dims} |"
        )
    return "\n".join(lines)


def _short(way: str) -> str:
    """The reason without the name of the processor, which is in the next column."""
    if not way.startswith("unchanged: "):
        return way
    if "flex" in way:
        return "unchanged (made for flex)"
    if "multi_head_attention_forward" in way:
        return "unchanged (torch's packed attention)"
    if "writes softmax" in way:
        return "unchanged (written out)"
    if "softmax attention" in way:
        return "unchanged (no softmax attention)"
    return way


def page(text: str, records: list[dict[str, Any]]) -> str:
    """The page with its table renewed."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table(records)}\n{END}{rest.split(END)[1]}"


def main(words: list[str]) -> None:
    records, failed = [], []
    for name, case in CASES.items():
        if words and not any(word.lower() in name.lower() for word in words):
            continue
        try:
            records.append(examine(case))
            print("ok  ", name, records[-1]["calls"], records[-1]["served"], records[-1]["head_dims"], flush=True)
        except Exception as problem:
            failed.append(name)
            print("FAIL", name, type(problem).__name__, str(problem)[:300], flush=True)
    print(f"{len(records)} cases, {len({r['class'] for r in records})} classes, {len(failed)} failed: {failed}")
    if failed:
        sys.exit(1)
    if not words:
        records.sort(key=lambda r: (r["class"], r["variant"]))
        RECORD.write_text(json.dumps({"diffusers": diffusers.__version__, "models": records}, indent=1) + "\n")
        PAGE.write_text(page(PAGE.read_text(), records))


if __name__ == "__main__":
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    main(sys.argv[1:])
