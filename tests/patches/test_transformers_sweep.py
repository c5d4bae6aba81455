"""The sweep: many families x every way to call them, "ffpa" against "eager", and what is recorded of it.

Some families run always, all of them under the slow mark. What a new transformers release changed shows here first.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path

import pytest
import transformers
import transformers_sweep as sweep
from transformers_structure import structure

from ffpa_hf.patches import attention_classes
from ffpa_hf.patches.attention_interface import ffpa_attention_forward

ROOT = Path(__file__).resolve().parents[2]

#: One of each kind: plain, sliding, chunked, softcap, sinks, two head dims, shared keys, chosen keys, narrow values, an
#: additive mask, position bias, an encoder, images.
ALWAYS = {
    "llama", "mistral", "llama4", "gemma2", "gpt_oss", "gemma4", "gemma4_shared", "deepseek_v32", "minimax_m3",
    "deepseek_v4", "t5", "modernbert", "gemma3_images",
}  # fmt: skip


def _cases():
    for family in sweep.FAMILIES:
        for way in sweep.ways_of(family):
            yield pytest.param(family, way, marks=[] if family in ALWAYS else [pytest.mark.slow], id=f"{family}, {way}")


@pytest.mark.parametrize(("family", "way"), _cases())
def test_equals_eager(family, way):
    if not sweep.FAMILIES[family].exists():
        pytest.skip(f"transformers {transformers.__version__} has no {sweep.FAMILIES[family].class_name}")
    result = sweep.outcome(family, way, "ffpa")
    assert sweep.is_right(family, way, result), result


def test_a_wrong_answer_would_be_seen(monkeypatch):
    """The sweep's own eyes: another scale, a lost mask, and a lost gradient are each found."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def spoiled(change):
        def function(module, query, key, value, attention_mask, **kwargs):
            return ffpa_attention_forward(module, *change(query, key, value, attention_mask), **kwargs)

        return function

    wrong = {
        "no padding": lambda q, k, v, mask: (q * 1.001, k, v, mask),
        "left padding": lambda q, k, v, mask: (q, k, v, mask.clone()[:1].expand(2, -1, -1, -1)),
        "checkpointing": lambda q, k, v, mask: (q.detach(), k, v, mask),
        "generate, static cache": lambda q, k, v, mask: (q, k, v.flip(2), mask),
    }
    for way, change in wrong.items():
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "ffpa", spoiled(change))
        assert sweep.outcome("llama", way, "ffpa").startswith("differs"), way


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    path = ROOT / "scripts" / "transformers_sweep.py"
    spec = importlib.util.spec_from_file_location("transformers_sweep_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def record(script):
    return json.loads(script.RECORD.read_text())


def test_the_page_shows_what_is_recorded(script, record):
    page = script.PAGE.read_text()
    assert script.written(page, record) == page


def test_the_record_is_of_this_sweep_and_without_a_failure(script, record):
    for release, result in record.items():
        assert set(result["cases"]) <= set(sweep.FAMILIES), release
        for family, cells in result["cases"].items():
            assert list(cells) == sweep.ways_of(family)
            for way, cell in cells.items():
                assert "why" in cell or sweep.is_right(family, way, cell["ffpa"]), (release, family, way)
    assert set(max(record.items(), key=lambda item: script._order(item[0]))[1]["cases"]) == set(sweep.FAMILIES)


def test_the_record_of_this_release_still_holds(script, record):
    if transformers.__version__ not in record:
        pytest.skip(f"transformers {transformers.__version__} is not recorded: scripts/transformers_sweep.py --update")
    recorded = record[transformers.__version__]
    for way in sweep.ways_of("llama"):
        assert sweep.short(sweep.outcome("llama", way, "ffpa")) == recorded["cases"]["llama"][way]["ffpa"]
    assert script.changes({"structure": structure(), "cases": {}}, {**recorded, "cases": {}}) == []


def test_changes_between_releases_are_named(script):
    before = {"structure": {"tables": ["a", "b"]}, "cases": {"llama": {"holes": {"ffpa": "ok"}}, "old": {}}}
    now = {"structure": {"tables": ["b", "c"]}, "cases": {"llama": {"holes": {"ffpa": "differs"}}, "new": {}}}
    assert script.changes(before, now) == [
        "tables: + c", "tables: - a", "llama: ffpa ok -> ffpa differs (holes)", "new: new", "old: gone",
    ]  # fmt: skip


# --- what the sources say ---------------------------------------------------------------------------------------------

#: Keywords that change no result here: lengths that the offsets tell as well, what only names a wish, and positions,
#: which are in the mask already.
IGNORED = {"max_length_q", "max_length_k", "position_ids", "deterministic"}


def test_every_keyword_that_a_model_hands_over_is_known():
    honoured = set(inspect.signature(ffpa_attention_forward).parameters) | {"output_attentions"}
    assert set(structure()["keywords given to the attention"]) <= honoured | IGNORED


def test_every_table_of_attention_classes_is_known():
    assert set(structure()["choose an attention class by name"]) <= set(attention_classes.TABLES)
