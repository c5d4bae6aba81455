"""Small JSON files that only this user can write: where self-test verdicts and tuned tables of this machine are kept.

A file that is missing, damaged or not safely ours reads as empty, never as an error. Knows nothing of what it keeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ffpa_hf import settings

_LOCK_SECONDS = 30.0


class UnsafeDirectory(OSError):
    """The directory belongs to somebody else, is a symbolic link, or can be written by others."""


def slug(device_name: str) -> str:
    """A device name as a file name: "NVIDIA H200" gives "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") or "unknown"


def config_dir() -> Path:
    """Where this user's verdicts and tables are kept: `FFPA_CACHE_DIR`, else the platform's configuration folder."""
    return place("config")


def place(kind: Literal["config", "cache"]) -> Path:
    """`FFPA_CACHE_DIR` as an absolute path, else the platform's folder of that kind for this user.

    A path that is not absolute stands for no place: `problem_with` says so, and nothing is read or written.
    """
    chosen = settings.current().cache_dir
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        import platformdirs

        folder = platformdirs.user_config_path if kind == "config" else platformdirs.user_cache_path
        return folder("ffpa_hf", appauthor=False)
    except (RuntimeError, OSError):  # no home, or no working directory any more
        return Path(chosen or "~")


def problem_with(directory: Path) -> str | None:
    """None where only this user can write `directory`; else the reason why nothing is read from or written to it."""
    if not directory.is_absolute():  # "~" of a user without a home; taken literally it would be a folder of that name
        return "it is no absolute path, as where a user has no home directory (FFPA_CACHE_DIR can name another place)"
    try:
        status = os.lstat(directory)
    except FileNotFoundError:
        return "it does not exist"
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "it is no directory"
    if hasattr(os, "getuid"):
        if status.st_uid != os.getuid():
            return "another user owns it"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "its group or others may write to it (chmod 700 makes it private)"
    return None


def made(directory: Path) -> str | None:
    """Make `directory`, private to this user, where it is missing; then `problem_with` it."""
    if directory.is_absolute() and not os.path.lexists(directory):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            return f"it cannot be made ({error.strerror or error})"
    return problem_with(directory)


def read_private(path: Path) -> bytes | None:
    """The bytes of a plain file that only this user can write; None for anything else (a link, a pipe, no file).

    What is looked at is the open file, so that nothing can be put in its place between the look and the reading.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return None
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            return None
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        return None
    finally:
        os.close(handle)


def read(name: str, directory: Path | None = None) -> dict[str, Any]:
    """The JSON object kept under `name`, or an empty one where there is none that can be trusted and parsed."""
    directory = directory or config_dir()
    if problem_with(directory) is not None:
        return {}
    content = read_private(directory / name)
    if content is None:
        return {}
    try:
        found = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def update(name: str, change: Callable[[dict[str, Any]], None], directory: Path | None = None) -> Path:
    """Read the object under `name`, let `change` edit it in place, and put it back whole; returns the path written.

    One writer at a time (a lock file beside it); readers see the old file or the new one, never half of either.
    Raises UnsafeDirectory where the directory is not private to this user, OSError where it cannot be written.
    """
    import filelock

    directory = directory or config_dir()
    problem = made(directory)
    if problem is not None:
        raise UnsafeDirectory(f"{directory} is not used: {problem}. FFPA_CACHE_DIR names another folder.")
    path = directory / name
    lock = filelock.FileLock(str(path) + ".lock", timeout=_LOCK_SECONDS)
    try:
        lock.acquire()
    except NotImplementedError as error:
        raise OSError(f"{directory} cannot be locked: {error}") from error
    try:
        content = read(name, directory)
        change(content)
        write_json(path, content)
    finally:
        lock.release()
    return path


def write_json(path: Path, content: Any) -> None:
    """Write `content` to a temporary file beside `path` and move it there in one step."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=False)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
