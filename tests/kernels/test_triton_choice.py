"""Tuned tiles: buckets, the tables of a user and of the package, what the launcher takes of them. No GPU is needed."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from ffpa_hf import settings
from ffpa_hf.backends import TritonBackend
from ffpa_hf.call import AttentionCall
from ffpa_hf.kernels import qualification, triton
from ffpa_hf.kernels.common import AttentionInputs
from ffpa_hf.kernels.triton import choice, configs, launch
from ffpa_hf.kernels.tuning import generation, tiles, triton_tuner
from ffpa_hf.kernels.tuning.tiles import Problem

GPU = "NVIDIA H200"
CPU = torch.device("cpu")
TARGET = configs.target_for((9, 0))
PROBLEM = Problem(512, 1, 32, 4, 8192, 8192, "causal", False, 2, 1024)
TILES = configs.ForwardConfig(64, 64, 64, 512, 8, 3)
ROW = {"tiles": choice.encode(TILES), "ms": 1.0, "rule_ms": 2.0, "tried": 3, "mode": "fast", "date": "2026-11-30"}
CALL = AttentionCall(
    batch=1, q_heads=32, kv_heads=4, q_len=8192, kv_len=8192, head_dim=512, value_dim=512, dtype=torch.bfloat16,
    capability=(9, 0), device_name=GPU, is_causal=True, needs_grad=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """This user's directory; the package ships nothing."""
    monkeypatch.setattr(tiles, "_TABLES", tmp_path / "shipped")
    with settings.override(cache_dir=str(tmp_path / "kept"), log="error"):
        choice.forget()
        yield tmp_path / "kept"
    choice.forget()


def tuned(direction="forward", problem=PROBLEM, name=GPU, autotune=None):
    found = choice.tuned(direction, problem, TARGET, CPU, name, autotune)
    return None if found is None else found.tiles


# --- buckets ----------------------------------------------------------------------------------------------------------


def test_lengths_of_one_power_of_two_share_a_bucket():
    same = [PROBLEM._replace(q_len=n, kv_len=m).bucket("forward") for n, m in ((4096, 8192), (8191, 16383))]
    assert same[0] == same[1] and (same[0].q_len, same[0].kv_len) == (4096, 8192)
    assert PROBLEM._replace(q_len=4095).bucket("forward").q_len == 2048


def test_the_longest_calls_and_the_most_heads_end_in_one_bucket():
    huge = PROBLEM._replace(q_len=10**6, kv_len=10**6, batch=1000, q_heads=64, kv_heads=1).bucket("forward")
    assert (huge.q_len, huge.kv_len, huge.lanes, huge.group) == (16384, 16384, 64, 8)


def test_the_shape_that_is_timed_lies_in_its_own_bucket():
    for q_len in (1, 5, 8, 77, 1000, 40000):
        for batch, q_heads, kv_heads in ((1, 1, 1), (2, 4, 1), (1, 8, 1), (3, 40, 8), (1, 32, 32)):
            problem = PROBLEM._replace(q_len=q_len, batch=batch, q_heads=q_heads, kv_heads=kv_heads)
            bucket = problem.bucket("forward")
            again = triton_tuner.problem_of(bucket)
            assert again.q_len <= q_len and again.kv_len <= problem.kv_len
            assert again.bucket("forward")._replace(lanes=0) == bucket._replace(lanes=0)
            assert again.q_heads % again.kv_heads == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 520}, {"mask": "none"}, {"busy": True}, {"workspace_mb": 64}, {"q_heads": 4, "kv_heads": 4},
        {"kv_heads": 32},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_the_best_tiles_changes_the_bucket(changes):
    buckets = {PROBLEM.bucket("forward").key, PROBLEM._replace(**changes).bucket("forward").key}
    buckets.add(PROBLEM.bucket("backward").key)
    assert len(buckets) == 3


# --- tables -----------------------------------------------------------------------------------------------------------


def test_without_a_table_the_rules_hold():
    assert tuned() is None and tuned("backward") is None
    assert choice.by_rule("forward", PROBLEM, TARGET) == configs.choose_wide(
        512, 32, 8192, 8192, 1024, TARGET.smem_limit, 2, True, False
    )


def test_a_kept_row_serves_its_whole_bucket_and_nothing_else(kept):
    tiles.keep(GPU, PROBLEM.bucket("forward"), ROW)
    assert tuned() == TILES and tuned(problem=PROBLEM._replace(q_len=9999)) == TILES
    assert tuned(problem=PROBLEM._replace(q_len=4000)) is None
    assert tuned("backward") is None and tuned(name="NVIDIA L4") is None and tuned(name="") is None
    assert tuned(problem=PROBLEM._replace(itemsize=4)) is None
    content = json.loads((kept / "triton-nvidia-h200.json").read_text())
    ((section, rows),) = content.items()
    assert section.startswith(qualification.source_hash("triton")) and rows == {PROBLEM.bucket("forward").key: ROW}


def test_rows_are_read_back_by_a_new_process():
    tiles.keep(GPU, PROBLEM.bucket("forward"), ROW)
    choice.forget()
    assert tuned() == TILES and tiles.counts(GPU) == (1, 0)


def test_rows_of_other_kernel_sources_are_ignored_and_left_alone(monkeypatch):
    tiles.keep(GPU, PROBLEM.bucket("forward"), ROW)
    with monkeypatch.context() as patched:
        patched.setattr(qualification, "source_hash", lambda family: "0123456789abcdef")
        choice.forget()
        assert tuned() is None
        tiles.keep(GPU, PROBLEM.bucket("backward"), ROW)
    choice.forget()
    assert tuned() == TILES


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"%s": []}', b'{"%s": {"%k": 3}}', b'{"%s": {"%k": {"tiles": 3}}}',
     b'{"%s": {"%k": {"tiles": {"kind": "Target"}}}}', b'{"%s": {"%k": {"tiles": {"kind": "ForwardConfig"}}}}'],
)  # fmt: skip
def test_a_damaged_table_is_no_table(kept, content):
    kept.mkdir(mode=0o700)
    section = tiles._section().encode()
    key = PROBLEM.bucket("forward").key.encode()
    (kept / "triton-nvidia-h200.json").write_bytes(content.replace(b"%s", section).replace(b"%k", key))
    (kept / "triton-nvidia-h200.json").chmod(0o600)
    choice.forget()
    assert tuned() is None


@pytest.mark.parametrize(
    "changes", [{"block_m": 128, "block_n": 128, "chunk": 0}, {"num_warps": -8}, {"block_m": "64"}, {"block_m": True}]
)
def test_tiles_that_are_illegal_or_no_numbers_are_no_tiles(changes):
    tiles.keep(GPU, PROBLEM.bucket("forward"), {**ROW, "tiles": {**ROW["tiles"], **changes}})
    assert tuned() is None


def test_a_forward_row_cannot_hold_backward_tiles():
    backward = choice.by_rule("backward", PROBLEM, TARGET)
    tiles.keep(GPU, PROBLEM.bucket("forward"), {**ROW, "tiles": choice.encode(backward)})
    assert tuned() is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [64, 256, 512])
def test_every_kind_of_config_survives_json(direction, head_dim):
    config = choice.by_rule(direction, PROBLEM._replace(head_dim=head_dim), TARGET)
    assert choice.decode(json.loads(json.dumps(choice.encode(config)))) == config


def test_this_users_rows_win_over_the_shipped_ones(kept, tmp_path):
    bucket = PROBLEM.bucket("forward")
    path = tiles.keep(GPU, bucket, ROW)
    written = tiles.ship(path, GPU, "2026-11-30", tmp_path / "shipped")
    assert json.loads(written.read_text())["source_hash"] == qualification.source_hash("triton")
    path.unlink()
    choice.forget()
    assert tiles.row(GPU, bucket) == (ROW, "the shipped table") and tuned() == TILES and tiles.counts(GPU) == (0, 1)
    mine = configs.ForwardConfig(64, 32, 64, 512, 8, 3)
    tiles.keep(GPU, bucket, {**ROW, "tiles": choice.encode(mine)})
    choice.forget()
    assert tuned() == mine and tiles.row(GPU, bucket)[1] == "this user's table"


def test_a_shipped_table_of_other_sources_is_ignored(tmp_path):
    written = tiles.ship(tiles.keep(GPU, PROBLEM.bucket("forward"), ROW), GPU, "2026-11-30", tmp_path / "shipped")
    content = json.loads(written.read_text())
    written.write_text(json.dumps({**content, "source_hash": "0"}))
    choice.forget()
    assert tiles.counts(GPU) == (1, 0)


def test_shipping_a_file_without_rows_says_so(tmp_path, capsys):
    empty = tmp_path / "empty.json"
    empty.write_text('{"other sources": {}}')
    arguments = ["--device", GPU, "--tables", str(tmp_path)]
    assert tiles.main(["--from", str(empty), *arguments]) == 1 and "no row" in capsys.readouterr().err
    path = tiles.keep(GPU, PROBLEM.bucket("forward"), ROW)
    assert tiles.main(["--from", str(path), *arguments]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "triton-nvidia-h200.json")


def test_shipped_tables_hold_legal_tiles():
    for path in (tiles.Path(tiles.__file__).parent / "tables").glob("triton-*.json"):
        content = json.loads(path.read_text())
        assert path.name == tiles._user_file(content["device"]) and content["rows"]
        for key, row in content["rows"].items():
            kinds = choice._KINDS[key.split()[0]]
            config = choice.decode(row["tiles"], kinds)
            head_dim = int(key.split()[1][1:])
            assert config is not None and configs.is_legal(config, head_dim, 227 * 1024, 2, True), key


# --- one choice per process -------------------------------------------------------------------------------------------


def test_a_choice_once_used_holds_for_the_process():
    assert tuned() is None
    tiles.keep(GPU, PROBLEM.bucket("forward"), ROW)
    assert tuned() is None, "a checkpoint's second pass must repeat the first"
    choice.forget()
    assert tuned() == TILES


def test_a_new_row_makes_explain_plan_anew():
    before = generation()
    tiles.keep(GPU, PROBLEM.bucket("forward"), ROW)
    assert generation() > before


@pytest.fixture
def tuner(monkeypatch):
    """A tuner that knows its answer; the buckets it was asked for."""
    asked = []

    def tune(bucket, device, mode, **_):
        asked.append((bucket, mode))
        return {**ROW, "mode": mode}

    monkeypatch.setattr(triton_tuner, "tune", tune)
    return asked


def test_autotuning_times_a_bucket_once_and_keeps_it(tuner, kept):
    assert tuned(autotune="fast") == TILES and tuned(problem=PROBLEM._replace(q_len=9000), autotune="fast") == TILES
    assert tuner == [(PROBLEM.bucket("forward"), "fast")]
    assert tuned(problem=PROBLEM._replace(q_len=1024), autotune="fast") == TILES and len(tuner) == 2
    choice.forget()  # a new process
    assert tuned(autotune="fast") == TILES and tuned() == TILES and len(tuner) == 2


def test_a_full_search_replaces_a_short_one_and_not_the_other_way_round(tuner):
    tuned(autotune="fast")
    choice.forget()
    tuned(autotune="max")
    choice.forget()
    tuned(autotune="max")
    tuned(autotune="fast")
    assert [mode for _, mode in tuner] == ["fast", "max"]


def test_calls_without_autotuning_keep_their_choice_while_others_tune(tuner):
    assert tuned() is None
    assert tuned(autotune="fast") == TILES
    assert tuned() is None


def test_a_checkpoints_second_forward_is_not_tuned(tuner):
    seen = []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append((tuned(autotune="fast"), tuned("backward", autotune="fast")))
            return grad

    Again.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen[0][0] is None and [bucket.direction for bucket, _ in tuner] == ["backward"]
    assert tuned(autotune="fast") == TILES, "the next ordinary call is"


def test_nothing_is_tuned_while_a_graph_is_captured(tuner, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuned(autotune="fast") is None and tuner == []


def test_a_compiled_graph_carries_no_autotuning():
    from ffpa_hf import ops

    config = TritonBackend(autotune=True, autotune_mode="max", workspace_mb=7)

    def function(x):
        return x + len(ops.encode(config))

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == len("triton workspace_mb=7")
    assert ops.decode(ops.encode(config)) == config


def test_many_threads_tune_a_bucket_once(tuner):
    found = []
    threads = [threading.Thread(target=lambda: found.append(tuned(autotune="fast"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [TILES] * 8 and len(tuner) == 1


def test_a_tuner_that_fails_leaves_the_rules_and_is_not_asked_again(monkeypatch, capsys):
    calls = []

    def tune(*_, **__):
        calls.append(1)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(triton_tuner, "tune", tune)
    with settings.override(log="warning"):
        assert tuned(autotune="fast") is None and tuned(autotune="fast") is None
    assert len(calls) == 1
    assert "not tuned (OutOfMemoryError: no room)" in capsys.readouterr().err


def test_a_table_that_cannot_be_written_serves_the_process(tuner, kept, capsys):
    kept.mkdir(mode=0o777)
    kept.chmod(0o777)
    with settings.override(log="warning"):
        assert tuned(autotune="fast") == TILES
    assert "cannot be kept" in capsys.readouterr().err and not list(kept.iterdir())


def test_tuning_is_announced_once_and_can_be_silenced(tuner, monkeypatch, capsys):
    monkeypatch.setattr(triton_tuner, "_announced", False)
    tuned(autotune="fast")
    assert capsys.readouterr().err == ""
    with settings.override(log="warning"):
        tuned("backward", autotune="fast")
        tuned(problem=PROBLEM._replace(q_len=64), autotune="fast")
    assert capsys.readouterr().err.count("timing Triton tiles") == 1


# --- the launcher and explain() ---------------------------------------------------------------------------------------


def _inputs(dtype=torch.float16):
    query, key, value = (torch.randn(1, 2, 40, 64, dtype=dtype) for _ in range(3))
    return AttentionInputs(query, key, value, 0.125)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted: the device is made up")
def test_the_launcher_takes_tuned_tiles_in_both_directions(monkeypatch):
    monkeypatch.setattr(launch, "_device_name", lambda where: GPU)
    target = launch._target(CPU)
    inputs = _inputs()
    problem = Problem(64, 1, 2, 2, 40, 40, "none", False, 2, 1024)
    forward = configs.ForwardConfig(16, 16, 0, 512, 4, 2)
    other = configs.choose_materialised(64, target.smem_limit)
    backward = configs.replace(other, scores=configs.ScoresConfig(64, 64, 32, 4, 2))
    for direction, config in (("forward", forward), ("backward", backward)):
        tiles.keep(GPU, problem.bucket(direction), {**ROW, "tiles": choice.encode(config)})
    used = []
    fused, products = launch._Fused, launch._Backward
    monkeypatch.setattr(launch, "_Fused", lambda *args: (used.append(args[2]), fused(*args))[1])
    monkeypatch.setattr(launch, "_Backward", lambda *args: (used.append(args[6]), products(*args))[1])
    out, lse, stats = triton.forward(inputs, TritonBackend())
    grads = triton.backward(inputs, out, lse, stats, out, None, (True, True, True, False, False), TritonBackend())
    assert used == [forward, backward]
    expected = launch.forward(inputs, 1024, tiles=choice.by_rule("forward", problem, target))[0]
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
    assert all(torch.isfinite(grad).all() for grad in grads[:3])


def test_explain_says_where_the_tiles_come_from():
    text = triton.describe(CALL)
    assert "table" not in text and "timed at" not in text
    assert triton.describe(CALL, TritonBackend(autotune=True)).count("timed at the first such call") == 2
    tiles.keep(GPU, PROBLEM.bucket("forward"), ROW)
    tiles._session.clear()
    text = triton.describe(CALL)
    assert "64 x 64 tiles" in text and text.count("tiles of this user's table") == 1
