"""Verdicts: what we ship, what a user's self-test adds, and what damage or strangers can do to either."""

from __future__ import annotations

import json
import multiprocessing
import os

import pytest
import torch

from ffpa_hf import settings
from ffpa_hf.kernels import qualification
from ffpa_hf.kernels.tuning import store

RECORDED = {
    "triton": {
        "source_hash": "0123456789abcdef",
        "ran": {
            "sm_90": {
                "device": "NVIDIA H200",
                "torch": "2.11.0",
                "compiler": "triton 3.6.0",
                "date": "2026-11-30",
                "cases": 80,
                "results": "selftest.json",
            }
        },
        "kin": ["sm_80", "sm_89"],
        "unrun": ["rocm"],
    }
}


@pytest.fixture
def kept(tmp_path):
    """A private directory for verdicts, and none remembered from before."""
    directory = tmp_path / "kept"
    with settings.override(cache_dir=str(directory)):
        qualification.forget()
        yield directory
    qualification.forget()


@pytest.fixture
def shipped(tmp_path, monkeypatch, kept):
    """Replace the shipped verdicts."""

    def write(content):
        path = tmp_path / "shipped.json"
        path.write_text(json.dumps(content))
        monkeypatch.setattr(qualification, "_SHIPPED", path)
        qualification.forget()

    return write


@pytest.fixture
def recorded(shipped):
    shipped(RECORDED)


def test_recorded_hash_is_that_of_the_sources():
    """A family may have no shipped verdict; a stale one fails, from the first edit of a kernel until a run on a GPU has
    been recorded: `ffpa-hf selftest --output R.json` there, then
    `python -m ffpa_hf.kernels.qualification --record R.json`."""
    assert set(qualification.shipped()) <= set(qualification.FAMILIES)
    for family, entry in qualification.shipped().items():
        assert entry["source_hash"] == qualification.source_hash(family)
        assert entry["ran"], f"no GPU run of {family} is recorded"


def test_a_family_without_a_shipped_verdict_waits_for_a_self_test(shipped):
    shipped({})
    verdict = qualification.verdict("cuda-fp8", (9, 0), False, "NVIDIA H200")
    assert verdict.level == "unrun" and not verdict.qualified
    assert "compiled" in verdict.text and "`ffpa-hf selftest --backend cuda-fp8`" in verdict.text


def test_hash_follows_contents_and_not_line_endings(monkeypatch, tmp_path):
    folder = tmp_path / "triton"
    folder.mkdir()
    monkeypatch.setattr(qualification, "__file__", str(tmp_path / "qualification.py"))

    def hashed(content: bytes) -> str:
        (folder / "kernel.py").write_bytes(content)
        qualification.source_hash.cache_clear()
        return qualification.source_hash("triton")

    try:
        first = hashed(b"a\nb\n")
        assert hashed(b"a\r\nb\r\n") == first
        assert hashed(b"a\nc\n") != first
        assert hashed(b"a\nb\n") == first
        (folder / "more.py").write_bytes(b"")
        qualification.source_hash.cache_clear()
        assert qualification.source_hash("triton") != first
    finally:
        qualification.source_hash.cache_clear()


def test_recorded_targets_ran_and_their_kin_may_run(recorded):
    ran = qualification.verdict("triton", (9, 0), False, "NVIDIA H100")
    assert ran.level == "run" and ran.qualified and "NVIDIA H200" in ran.text and "triton 3.6.0" in ran.text
    kin = qualification.verdict("triton", (8, 9), False, "NVIDIA L4")
    assert kin.level == "kin" and kin.qualified and "sm_90" in kin.text


@pytest.mark.parametrize(("capability", "is_rocm"), [((9, 4), True), ((12, 1), False), ((7, 5), False)])
def test_other_targets_wait_for_a_self_test(recorded, capability, is_rocm):
    verdict = qualification.verdict("triton", capability, is_rocm, "some GPU")
    assert verdict.level == "unrun" and not verdict.qualified and "selftest" in verdict.text


def test_rocm_is_not_taken_for_the_cuda_target_of_the_same_number(recorded):
    assert qualification.verdict("triton", (9, 0), True, "AMD Instinct MI300X").level == "unrun"


def test_without_a_recorded_run_nothing_is_kin(shipped):
    shipped({"triton": {**RECORDED["triton"], "ran": {}}})
    assert qualification.verdict("triton", (8, 9), False, "NVIDIA L4").level == "unrun"


def test_the_interpreter_needs_no_verdict(kept):
    assert qualification.verdict("triton", None).qualified


def test_unknown_family_is_named():
    with pytest.raises(ValueError, match="'cutlass'"):
        qualification.verdict("cutlass", (9, 0))


def test_a_verdict_is_a_constant_under_compile(recorded):
    def function(x):
        return x + 1 if qualification.verdict("triton", (9, 0), False, "NVIDIA H200").qualified else x - 1

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == 1


# --- a user's verdicts ------------------------------------------------------------------------------------------------


def keep(failed: int = 0, name: str = "AMD Instinct MI300X", cases: int = 80):
    return qualification.keep(
        "triton", (9, 4), True, name, cases=cases, failed=failed, date="2026-12-01T10:00:00+00:00"
    )


def ask(name: str = "AMD Instinct MI300X"):
    return qualification.verdict("triton", (9, 4), True, name)


def test_a_passed_self_test_qualifies_this_gpu_model_only(recorded, kept):
    path = keep()
    assert path.parent == kept and path.stat().st_mode & 0o777 == 0o600 and kept.stat().st_mode & 0o777 == 0o700
    assert ask().level == "self_tested" and "80 cases, 2026-12-01" in ask().text
    assert ask("AMD Instinct MI250").level == "unrun"
    assert qualification.verdict("triton", (12, 1), False, "AMD Instinct MI300X").level == "unrun"


def test_a_failed_self_test_keeps_a_shipped_kernel_off(recorded):
    qualification.keep("triton", (9, 0), False, "NVIDIA H200", cases=80, failed=3, date="2026-12-01")
    verdict = qualification.verdict("triton", (9, 0), False, "NVIDIA H200")
    assert not verdict.qualified and "3 of 80" in verdict.text
    qualification.keep("triton", (9, 0), False, "NVIDIA H200", cases=80, failed=0, date="2026-12-02")
    assert qualification.verdict("triton", (9, 0), False, "NVIDIA H200").level == "run"


def test_a_verdict_ends_with_its_sources_and_its_compiler(recorded, monkeypatch):
    keep()
    for name in ("source_hash", "compiler_version"):
        with monkeypatch.context() as other:
            other.setattr(qualification, name, lambda family: "another")
            qualification.forget()
            assert ask().level == "unrun", name
    qualification.forget()
    assert ask().level == "self_tested"


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'{"a": 1}', b"[" * 100_000],
    ids=["empty", "cut short", "no text", "a list", "null", "another object", "deep"],
)
def test_a_damaged_file_counts_as_none_and_is_replaced(recorded, kept, damage):
    path = keep()
    path.write_bytes(damage)
    qualification.forget()
    assert ask().level == "unrun"
    keep()
    assert ask().level == "self_tested"


@pytest.mark.parametrize(
    "entry", [None, [], {"passed": True}, {"passed": "yes", "cases": 1, "failed": 0, "date": "2026"}]
)
def test_a_damaged_entry_counts_as_none(recorded, kept, entry):
    path = keep()
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: entry for key in content}))
    qualification.forget()
    assert ask().level == "unrun"


def test_a_directory_that_others_can_write_is_neither_read_nor_written(recorded, kept):
    keep()
    for mode in (0o770, 0o707):
        kept.chmod(mode)
        qualification.forget()
        assert ask().level == "unrun"
        with pytest.raises(store.UnsafeDirectory, match="others may write"):
            keep()
    kept.chmod(0o700)
    qualification.forget()
    assert ask().level == "self_tested"


def test_a_file_that_others_can_write_is_not_read(recorded):
    keep().chmod(0o666)
    qualification.forget()
    assert ask().level == "unrun"


def test_a_linked_directory_is_not_used(recorded, kept, tmp_path):
    keep()
    link = tmp_path / "link"
    link.symlink_to(kept)
    with settings.override(cache_dir=str(link)):
        assert ask().level == "unrun"
        with pytest.raises(store.UnsafeDirectory, match="symbolic link"):
            keep()


def test_a_linked_file_is_not_read(recorded, kept, tmp_path):
    path = keep()
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    qualification.forget()
    assert ask().level == "unrun"


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_not_used(recorded, kept):
    keep()
    os.chown(kept, 12345, -1)
    qualification.forget()
    assert ask().level == "unrun"
    with pytest.raises(store.UnsafeDirectory, match="another user"):
        keep()


def test_a_directory_that_cannot_be_made_raises_and_reads_as_empty(recorded, tmp_path):
    (tmp_path / "file").write_text("")
    with settings.override(cache_dir=str(tmp_path / "file" / "kept")):
        assert ask().level == "unrun"
        with pytest.raises(OSError):
            keep()


def _keep_many(directory: str, worker: int) -> None:
    with settings.override(cache_dir=directory):
        for index in range(5):
            keep(name=f"GPU {worker} {index}")


def test_processes_writing_at_once_lose_nothing(kept):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_keep_many, args=(str(kept), worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(json.loads((kept / "verdicts.json").read_text())) == 20
    assert sorted(path.name for path in kept.iterdir()) == ["verdicts.json", "verdicts.json.lock"]


# --- recording --------------------------------------------------------------------------------------------------------


@pytest.fixture
def passed_run(tmp_path):
    def write(**changes):
        content = {
            "family": "triton",
            "device": "NVIDIA H200",
            "target": "sm_90",
            "source_hash": qualification.source_hash("triton"),
            "compiler": "triton 3.6.0",
            "torch": "2.11.0",
            "date": "2026-11-30T21:00:00+00:00",
            "complete": True,
            "cases": 80,
            "failed": 0,
            "rows": [],
        }
        path = tmp_path / "selftest.json"
        path.write_text(json.dumps({**content, **changes}))
        return path

    return write


@pytest.fixture
def verdicts(tmp_path):
    path = tmp_path / "verdicts.json"
    path.write_text(json.dumps(RECORDED))
    return path


def test_a_run_of_new_sources_replaces_what_ran_before(passed_run, verdicts):
    entry = RECORDED["triton"]
    verdicts.write_text(json.dumps({"triton": {**entry, "ran": {**entry["ran"], "sm_80": entry["ran"]["sm_90"]}}}))
    qualification.record(passed_run(), verdicts)
    entry = json.loads(verdicts.read_text())["triton"]
    assert entry["source_hash"] == qualification.source_hash("triton")
    assert list(entry["ran"]) == ["sm_90"] and entry["ran"]["sm_90"]["results"] == "selftest.json"
    assert entry["kin"] == ["sm_80", "sm_89"]


def test_a_second_target_of_the_same_sources_is_added(passed_run, verdicts):
    qualification.record(passed_run(), verdicts)
    qualification.record(passed_run(target="sm_80", device="NVIDIA A100"), verdicts)
    assert sorted(json.loads(verdicts.read_text())["triton"]["ran"]) == ["sm_80", "sm_90"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"failed": 1}, "1 of 80"),
        ({"cases": 0}, "0 of 0"),
        ({"complete": False}, "complete"),
        ({"target": "cpu"}, "GPU"),
        ({"source_hash": "another"}, "another"),
    ],
)
def test_a_run_that_proves_nothing_is_not_recorded(passed_run, verdicts, changes, named):
    before = verdicts.read_text()
    with pytest.raises(ValueError, match=named):
        qualification.record(passed_run(**changes), verdicts)
    assert verdicts.read_text() == before


def test_recording_on_the_command_line_reports_a_bad_file(tmp_path, capsys):
    path = tmp_path / "nothing.json"
    assert qualification.main(["--record", str(path)]) == 1
    path.write_text("{}")
    assert qualification.main(["--record", str(path)]) == 1
    assert "not recorded" in capsys.readouterr().err
