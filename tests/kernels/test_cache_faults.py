"""Caches on bad ground: no home, read-only, full, planted files, killed writers, many processes.

Always a miss with at most a warning, never a crash, a stale entry or a file that others could have written.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from ffpa_hf import settings
from ffpa_hf.kernels import compile_cache
from ffpa_hf.kernels.tuning import store

CODE = b"machine code" * 1000
posix = pytest.mark.skipif(os.name != "posix", reason="POSIX files and signals")


@pytest.fixture(autouse=True)
def _warn_anew():
    compile_cache._warned.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "compiled"


# --- places that cannot be used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EROFS, "Read-only file system"),
        OSError(errno.EACCES, "Permission denied"),
        OSError(errno.ENOSPC, "No space left on device"),
        NotImplementedError("FileSystem does not appear to support flock"),
    ],
    ids=["read-only", "not ours to write", "full", "without locks"],
)
def test_a_folder_that_takes_no_lock_costs_the_entry_and_not_the_result(folder, monkeypatch, error):
    import filelock

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be locked"):
        assert compile_cache.get("key", lambda: CODE, folder) == CODE
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        assert compile_cache.get("key", lambda: CODE, folder) == CODE
    with pytest.raises(OSError):  # of which every caller that keeps tables knows
        store.update("table.json", lambda content: content.update(a=1), folder)


def test_an_entry_in_a_folder_that_became_read_only_is_still_read(folder, monkeypatch):
    import filelock

    compile_cache.get("key", lambda: CODE, folder)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_cache.get("key", pytest.fail, folder) == CODE


def test_what_the_compiler_raises_is_never_taken_for_a_fault_of_the_cache(folder):
    def build() -> bytes:
        raise PermissionError("the compiler's own")

    with pytest.raises(PermissionError, match="the compiler's own"):
        compile_cache.get("key", build, folder)


@posix
def test_a_disk_that_fills_up_while_writing_leaves_nothing_behind(folder):
    """A real failing write: the size of files is limited in a child process."""

    def child() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store.update("table.json", lambda content: content.update(old=1), folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert compile_cache.get("key", lambda: CODE, folder) == CODE
        assert len(said) == 1 and "could not be kept" in str(said[0].message)
        with pytest.raises(OSError):
            store.update("table.json", lambda content: content.update(new="x" * 4096), folder)

    assert _in_child(child) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["key.lock", "table.json", "table.json.lock"]
    assert store.read("table.json", folder) == {"old": 1}


@posix
def test_a_user_without_a_home_keeps_nothing_and_computes(tmp_path):
    program = (
        "import os, pwd, sys, warnings\n"
        "def nobody(*_): raise KeyError('no such user')\n"
        "pwd.getpwuid = pwd.getpwnam = nobody\n"
        "import torch, ffpa_hf\n"
        "from ffpa_hf.kernels import compile_cache\n"
        "from ffpa_hf.kernels.tuning import store, tiles\n"
        "from ffpa_hf import settings\n"
        "for place in (None, '~/cache', '~somebody/cache'):\n"
        "    compile_cache._warned.clear()\n"
        "    with settings.override(cache_dir=place), warnings.catch_warnings(record=True) as said:\n"
        "        warnings.simplefilter('always')\n"
        "        assert compile_cache.get('key', lambda: b'code') == b'code'\n"
        "        assert len(said) == 1 and 'no home' in str(said[0].message), said\n"
        "        assert store.read('verdicts.json') == {}\n"
        "        try:\n"
        "            store.update('verdicts.json', dict.clear)\n"
        "        except store.UnsafeDirectory as problem:\n"
        "            assert 'no home' in str(problem)\n"
        "        else:\n"
        "            raise AssertionError('kept somewhere')\n"
        "        query = torch.randn(1, 1, 600, 320)\n"
        "        print(ffpa_hf.explain(query, query, query))\n"
    )
    dropped = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "FFPA_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []  # no folder named "~"


def test_a_relative_folder_is_that_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with settings.override(cache_dir="mine"):
        compile_cache.get("key", lambda: CODE)
        store.update("table.json", lambda content: content.update(a=1))
        assert (tmp_path / "mine" / "compiled" / "key").is_file()
        assert store.read("table.json") == {"a": 1}


def test_a_folder_that_cannot_be_made_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be made .Not a directory"):
        assert compile_cache.get("key", lambda: CODE, tmp_path / "file" / "compiled") == CODE
    with pytest.raises(store.UnsafeDirectory, match="cannot be made .Not a directory"):
        store.update("table.json", dict.clear, tmp_path / "file" / "kept")


# --- entries that are not ours ----------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("how", ["group may write", "others may write", "link", "pipe", "folder"])
def test_an_entry_that_others_may_have_written_is_a_miss(folder, tmp_path, how):
    compile_cache.get("key", lambda: CODE, folder)
    store.update("table.json", lambda content: content.update(theirs=1), folder)
    for name in ("key", "table.json"):
        entry = folder / name
        if how.endswith("may write"):
            entry.chmod(0o620 if "group" in how else 0o602)
            continue
        elsewhere = tmp_path / name
        entry.rename(elsewhere)
        {"link": lambda e=entry, t=elsewhere: e.symlink_to(t), "pipe": lambda e=entry: os.mkfifo(e, 0o600),
         "folder": lambda e=entry: e.mkdir()}[how]()  # fmt: skip
    assert compile_cache.read("key", folder) is None
    assert store.read("table.json", folder) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a folder cannot be replaced, which is said
        assert compile_cache.get("key", lambda: b"ours", folder) == b"ours"
    if how != "folder":
        assert compile_cache.read("key", folder) == b"ours"
        store.update("table.json", lambda content: content.update(ours=1), folder)
        assert store.read("table.json", folder) == {"ours": 1}
    if how == "link":  # nothing was written through it
        assert json.loads((tmp_path / "table.json").read_text()) == {"theirs": 1}


@pytest.mark.parametrize("content", [b"\x80\x04K\x01.", b"{" * 100, b"\x00" * 64, '{"a": 1}\n'.encode("utf-16"), b"1"])
def test_files_of_other_formats_are_misses(folder, content):
    compile_cache.get("key", lambda: CODE, folder)
    for name in ("key", "table.json"):
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    assert compile_cache.read("key", folder) is None and store.read("table.json", folder) == {}
    assert compile_cache.get("key", lambda: b"new", folder) == b"new"


# --- many processes ---------------------------------------------------------------------------------------------------


def _in_child(work, *arguments) -> int:
    """The exit code of `work` in a forked process."""
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def _write_for_ever(folder: str, worker: int, rounds: int) -> None:
    index = 0
    while rounds == 0 or index < rounds:
        store.update(
            "table.json", lambda content, at=index: content.update({f"{worker} {at}": "x" * 500}), Path(folder)
        )
        compile_cache.get(f"kernel{index % 7}", lambda at=index: bytes([at % 7]) * 5000, Path(folder))
        index += 1


@posix
def test_sixteen_processes_and_killed_ones_among_them_lose_nothing(folder):
    context = multiprocessing.get_context("fork")
    killed = [context.Process(target=_write_for_ever, args=(str(folder), 100 + n, 0)) for n in range(4)]
    working = [context.Process(target=_write_for_ever, args=(str(folder), n, 4)) for n in range(12)]
    for process in killed + working:
        process.start()
    for process in killed:  # at four different moments
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    for process in killed + working:
        process.join(60)
    assert [process.exitcode for process in working] == [0] * 12
    assert [process.exitcode for process in killed] == [-signal.SIGKILL] * 4
    kept = store.read("table.json", folder)
    assert {f"{worker} {index}" for worker in range(12) for index in range(4)} <= kept.keys()
    for index in range(4):
        assert compile_cache.read(f"kernel{index}", folder) == bytes([index]) * 5000


@posix
def test_a_writer_killed_while_it_holds_the_lock_keeps_nobody_waiting(folder):
    def dies() -> None:
        compile_cache.get("key", lambda: os.kill(os.getpid(), signal.SIGKILL), folder)

    assert _in_child(dies) == -signal.SIGKILL
    begun = time.monotonic()
    assert compile_cache.get("key", lambda: CODE, folder) == CODE
    assert time.monotonic() - begun < 5
    assert compile_cache.read("key", folder) == CODE
