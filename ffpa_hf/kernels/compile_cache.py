"""Compiled kernels on disk: bytes under a key, private to this user, whole or absent.

Holds cubins and other compiled objects, never pickles. A damaged entry is a miss, and a directory that others could
write to is not used at all. Knows no compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from ffpa_hf import settings
from ffpa_hf.kernels.tuning import store

#: How long another process may take to compile the same kernel before this one compiles it too.
_LOCK_SECONDS = 300.0
_DIGEST = hashlib.sha256().digest_size


def directory() -> Path:
    """`compiled` under `FFPA_CACHE_DIR`, else the platform's cache folder of this user."""
    return store.place("cache") / "compiled"


def key_of(*parts: str) -> str:
    """A file name for everything that a compiled kernel depends on: sources, options, target, compiler."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()[:40]


def read(key: str, folder: Path | None = None) -> bytes | None:
    """The bytes kept under `key`; None where there are none, or none that are whole and safely ours."""
    folder = folder or directory()
    if store.problem_with(folder) is not None:
        return None
    content = store.read_private(folder / key)
    if content is None:
        return None
    digest, payload = content[:_DIGEST], content[_DIGEST:]
    return payload if payload and hashlib.sha256(payload).digest() == digest else None


def get(key: str, build: Callable[[], bytes], folder: Path | None = None) -> bytes:
    """The bytes under `key`, built and kept where they are missing; one process builds, others wait for it.

    Where the directory cannot be used (others may write to it, it is read-only, the disk is full) the result is built
    and not kept, with one RuntimeWarning per process and reason. What `build` raises goes through.
    """
    folder = folder or directory()
    found = read(key, folder)
    if found is not None:
        return found
    problem = store.made(folder)
    if problem is not None:
        _warn(
            f"{folder} is not used to keep compiled kernels: {problem}. Every process compiles its own; "
            "FFPA_CACHE_DIR names another folder."
        )
        return build()

    import filelock

    lock = filelock.FileLock(str(folder / f"{key}.lock"), timeout=_LOCK_SECONDS)
    try:
        lock.acquire()
    except filelock.Timeout:
        return build()
    except (OSError, NotImplementedError) as error:  # read-only, full, or a file system without locks
        _warn(f"{folder} is not used to keep compiled kernels: it cannot be locked ({error}).")
        return build()
    try:
        found = read(key, folder)
        if found is None:
            found = build()
            _write(folder / key, found)
        return found
    finally:
        lock.release()


def _write(path: Path, payload: bytes) -> None:
    """Write beside `path` and move there in one step; a full disk costs the entry, not the result."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        _warn(
            f"a compiled kernel could not be kept in {path.parent}: {error.strerror or error}. It runs, and the next "
            "process compiles it again; FFPA_CACHE_DIR names another folder."
        )


_warned: set[str] = set()


def _warn(text: str) -> None:
    if text not in _warned and not settings.silenced():
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
