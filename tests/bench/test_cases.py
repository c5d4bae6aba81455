"""What the cases count, and how they are picked."""

from __future__ import annotations

import pytest
import torch

from ffpa_hf.bench import cases
from ffpa_hf.bench.cases import Case


@pytest.mark.parametrize(
    "case", [*cases.CPU_SMOKE, Case("cross", 2, 5, 9, 64, causal=True), Case("tall", 2, 9, 5, 64)], ids=str
)
def test_pairs_are_those_of_the_mask(case):
    row, key = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)
    allowed = torch.ones(case.q_len, case.kv_len, dtype=torch.bool)
    if case.causal:
        allowed &= key <= row
    if case.window is not None:
        allowed &= key > row - case.window
    if case.documents:
        length = case.q_len // case.documents
        assert case.pairs() == case.documents * length**2 / 2  # half of N^2 by convention
        return
    expected = float(allowed.sum())
    if case.causal and case.window is None and case.q_len == case.kv_len:
        expected = case.q_len**2 / 2  # half of N^2 by convention
    assert case.pairs() == expected


def test_flops_follow_the_published_count():
    by_id = {case.id: case for case in cases.KERNEL}
    full, half = by_id["d512_self_8k"], by_id["d512_causal_8k"]
    assert full.flops("fwd") == 4 * 32 * 512 * 8192**2
    assert half.flops("fwd") == full.flops("fwd") / 2
    assert full.flops("bwd") == 2.5 * full.flops("fwd") and full.flops("fwd+bwd") == 3.5 * full.flops("fwd")
    window = by_id["d256_window1k_8k"]
    assert window.flops("fwd") == 4 * 32 * 256 * (1024 * 1025 / 2 + (8192 - 1024) * 1024)


def test_published_cases_are_all_there():
    ids = {case.id for case in cases.KERNEL}
    assert ids == {
        "d512_self_8k", "d512_causal_8k", "d512_gqa_causal_8k", "d512_1h_16k", "d512_cross_1k_8k", "d512_decode_8k",
        "d320_self_8k", "d384_self_8k", "d640_self_4k", "d1024_self_4k", "d256_self_8k", "d256_window1k_8k",
        "d128_flux", "d64_cogvideox", "d128_self_16k",
    }  # fmt: skip


def test_every_id_is_used_once():
    sets = (cases.KERNEL, cases.PACKED, cases.VAE, cases.OVERHEAD, cases.SWEEP, cases.SWEEP_TINY, cases.CPU_SMOKE)
    everything = [case.id for chosen in sets for case in chosen]
    assert len(everything) == len(set(everything))


def test_autoencoders_cover_every_head_dim_at_two_sizes():
    assert {case.head_dim for case in cases.VAE} == {384, 512, 640, 768, 1024, 1152}
    assert all(case.heads == case.batch == 1 and case.mask == "none" for case in cases.VAE)
    assert cases.select(["vae"]) == cases.VAE and len(cases.select(["vae_*_2048px"])) == 6


def test_select_takes_sets_ids_and_globs_once_each():
    chosen = cases.select(["d1024*", "cpu_smoke", "d1024_self_4k"])
    assert [case.id for case in chosen] == [
        "d1024_self_4k", "cpu_self", "cpu_gqa_causal", "cpu_window", "cpu_packed",
    ]  # fmt: skip
    assert cases.select(["sweep"]) == cases.SWEEP
    with pytest.raises(ValueError, match="'nothing'"):
        cases.select(["cpu_smoke", "nothing"])


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_heads": 3},
        {"window": 4},
        {"window": 4, "causal": True, "kv_len": 9},
        {"graph": True, "directions": ("bwd",)},
        {"form": "padded"},
        {"form": "bool", "causal": True},
        {"documents": 2},
        {"documents": 3, "causal": True},
        {"documents": 2, "causal": True, "kv_len": 16},
    ],
)
def test_a_case_that_means_nothing_raises(fields):
    with pytest.raises(ValueError, match="odd"):
        Case(**{"id": "odd", "heads": 4, "q_len": 8, "kv_len": 8, "head_dim": 64, **fields})
