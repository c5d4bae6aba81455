"""Compiled kernels on disk: kept whole, private, rebuilt when damaged, never trusted from a folder others can write."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ffpa_hf import settings
from ffpa_hf.kernels import compile_cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "compiled"


class Builder:
    """Counts how often it is asked."""

    def __init__(self, payload: bytes = b"machine code") -> None:
        self.payload, self.calls = payload, 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.payload


def test_an_entry_is_built_once_and_read_afterwards(folder):
    build = Builder()
    assert compile_cache.get("key", build, folder) == compile_cache.get("key", build, folder) == b"machine code"
    assert build.calls == 1
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "short"])
def test_a_damaged_entry_is_built_again(folder, damage):
    compile_cache.get("key", Builder(), folder)
    entry = folder / "key"
    content = entry.read_bytes()
    changed = {
        "cut": content[:-1],
        "flipped": content[:-1] + bytes([content[-1] ^ 1]),
        "empty": b"",
        "short": content[:8],
    }
    entry.write_bytes(changed[damage])
    assert compile_cache.read("key", folder) is None
    build = Builder(b"new")
    assert compile_cache.get("key", build, folder) == b"new" and build.calls == 1
    assert compile_cache.read("key", folder) == b"new"


def test_a_folder_that_others_can_write_is_not_used(folder):
    folder.mkdir()
    folder.chmod(0o777)
    build = Builder()
    compile_cache._warned.clear()
    with pytest.warns(RuntimeWarning, match="others may write"):
        assert compile_cache.get("key", build, folder) == b"machine code"
    assert list(folder.iterdir()) == []
    assert compile_cache.read("key", folder) is None


def test_an_entry_planted_by_a_link_is_not_followed_into_another_folder(folder, tmp_path):
    compile_cache.get("key", Builder(b"theirs"), tmp_path / "other")
    folder.symlink_to(tmp_path / "other")
    compile_cache._warned.clear()
    with pytest.warns(RuntimeWarning, match="symbolic link"):
        assert compile_cache.get("key", Builder(b"ours"), folder) == b"ours"


def test_what_the_compiler_raises_goes_through_and_leaves_nothing(folder):
    def fails() -> bytes:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        compile_cache.get("key", fails, folder)
    assert compile_cache.read("key", folder) is None
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]


def test_a_full_disk_costs_the_entry_and_not_the_result(folder, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compile_cache.tempfile, "mkstemp", full)
    compile_cache._warned.clear()
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert compile_cache.get("key", Builder(), folder) == b"machine code"


def test_several_threads_and_processes_build_one_entry_together(folder):
    build = Builder()
    threads = [threading.Thread(target=compile_cache.get, args=("key", build, folder)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.calls == 1
    code = (
        "import sys, pathlib; from ffpa_hf.kernels import compile_cache\n"
        "def never(): raise SystemExit('built again')\n"
        "print(compile_cache.get('key', never, pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "b'machine code'", done.stderr


def test_keys_do_not_run_together():
    assert compile_cache.key_of("ab", "c") != compile_cache.key_of("a", "bc")
    assert compile_cache.key_of("a") == compile_cache.key_of("a")


def test_the_folder_follows_the_setting(tmp_path):
    with settings.override(cache_dir=str(tmp_path)):
        assert compile_cache.directory() == tmp_path / "compiled"
