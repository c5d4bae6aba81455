"""Every Triton kernel compiles ahead of time for GPUs that are not here, inside their shared memory."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from triton_ahead import HEAD_DIMS, LENGTH, TARGETS, compiled, grid, inputs_of, target_of  # noqa: E402

from ffpa_hf.kernels.triton import choice, configs, launch  # noqa: E402

WITHOUT_PRODUCTS = ("row_delta", "key_reach")


def check_memory(rows, target):
    for row in rows:
        assert row["shared"] <= target.smem_limit, row
        assert row["binary_bytes"] > 0


def test_hopper_kernels_use_its_matrix_units_and_descriptors():
    rows = compiled("cuda", "90", "72,window,bias,softcap,sinks,dropout", "512,wide,causal,groups", "128,window,groups")
    check_memory(rows, configs.target_for((9, 0)))
    names = {row["kernel"] for row in rows}
    assert names == {
        "attention_forward", "forward_scores", "forward_product", "row_delta", "backward_scores", "gradient_query",
        "gradient_key", "gradient_bias", "key_reach", "gradient_key_value",
    }  # fmt: skip
    for row in rows:
        if row["kernel"] not in WITHOUT_PRODUCTS:
            assert row["wgmma"] > 0 and row["tma"] > 0 and row["mma"] == 0, row


def test_the_same_source_compiles_without_descriptors():
    rows = compiled("cuda", "89", "320,causal,mask,fp16", "128,window")
    assert "gradient_key_value" in {row["kernel"] for row in rows}
    check_memory(rows, configs.target_for((8, 9)))
    for row in rows:
        assert row["wgmma"] == 0 and row["tma"] == 0
        assert (row["mma"] > 0) == (row["kernel"] not in WITHOUT_PRODUCTS), row


def test_decoding_compiles_with_and_without_splits():
    calls = "512,decode,groups", "128,decode,single,bias,softcap", "72,decode,window,sinks,dropout,fp16"
    rows = [row for row in compiled("cuda", "90", *calls) if row["kernel"].startswith("decode")]
    check_memory(rows, configs.target_for((9, 0)))
    assert [row["kernel"] for row in rows] == ["decode_split", "decode_combine"] + ["decode_split"] * 2 + [
        "decode_combine"
    ]
    assert all((row["mma"] > 0) == (row["kernel"] == "decode_split") for row in rows)


QKV = ("128,qkv", "128,qkv,across,complex", "72,qkv,halves,fp16")


@pytest.mark.parametrize(("backend", "arch"), [("cuda", "80"), ("cuda", "90"), ("cuda", "120"), ("hip", "gfx942")])
def test_queries_and_keys_are_normalised_and_rotated_on_every_target(backend, arch):
    rows = compiled(backend, arch, *QKV)
    check_memory(rows, target_of(backend, arch))
    assert [row["kernel"] for row in rows] == ["place_stream"] * 6
    assert not any(row.get("spilled_bytes") for row in rows), rows


# --- the whole grid ---------------------------------------------------------------------------------------------------

#: Most bytes that a thread of a kernel may spill on an H200 without a mask, bias, cap or dropout: of tiles that were
#: faster when measured than those which spill nothing (docs/kernels.md). Other kernels spill nothing.
MOST_SPILLED = {"attention_forward": 1024, "forward_scores": 64, "backward_scores": 512, "decode_split": 64}


def tiles_of(target, call):
    """The configs that a call of the grid is launched with."""
    head_dim, *features = call.split(",")
    inputs = inputs_of(int(head_dim), set(features))
    batch, q_heads, q_len, _ = inputs.query.shape
    mask = "causal" if inputs.is_causal else "none" if inputs.row_start is None else "intervals"
    sizes = int(head_dim), batch, q_heads, inputs.key.shape[1], q_len, inputs.key.shape[2]
    problem = choice.Problem(*sizes, mask, launch._busy(inputs), 2, 1024)
    return {choice.by_rule("forward", problem, target), choice.by_rule("backward", problem, target)}


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_the_grid_leaves_out_no_tile_that_a_call_can_get(target):
    limits = target_of(*target)
    compiled_tiles = set().union(*(tiles_of(limits, call) for head_dim in HEAD_DIMS for call in grid(head_dim)))
    missing = {}
    for head_dim, heads, kv_heads, q_len, mask, busy in itertools.product(
        range(64, 1025, 8), (2, 16, 32), (1, 2), (1, 7, 8, LENGTH), ("none", "intervals"), (False, True)
    ):
        problem = choice.Problem(head_dim, 1, heads, min(heads, kv_heads), q_len, LENGTH, mask, busy, 2, 1024)
        for direction in ("forward", "backward"):
            tiles = choice.by_rule(direction, problem, limits)
            if tiles not in compiled_tiles:
                missing.setdefault(tiles, problem)
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_every_tile_compiles_for_every_target_inside_its_shared_memory(target, head_dim):
    rows = compiled(*target, *grid(head_dim))
    check_memory(rows, target_of(*target))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_plain_calls_on_an_h200_spill_next_to_nothing(head_dim):
    plain = [call for call in grid(head_dim) if not {"mask", "bias", "softcap", "dropout"} & set(call.split(","))]
    for row in compiled("cuda", "90", *plain):
        assert row["spilled_bytes"] <= MOST_SPILLED.get(row["kernel"], 0), row
