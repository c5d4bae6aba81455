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
from typing import Any

from ffpa_hf import settings

_LOCK_SECONDS = 30.0


class UnsafeDirectory(OSError):
    """The directory belongs to somebody else, is a symbolic link, or can be written by others."""


def slug(device_name: str) -> str:
    """A device name as a file name: "NVIDIA H200" gives "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") or "unknown"


def config_dir() -> Path:
    """Where this user's verdicts and tables are kept: `FFPA_CACHE_DIR`, else the platform's configuration folder."""
    chosen = settings.current().cache_dir
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return platformdirs.user_config_path("ffpa_hf", appauthor=False)


def problem_with(directory: Path) -> str | None:
    """None where only this user can write `directory`; else the reason why nothing is read from or written to it."""
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


def read(name: str, directory: Path | None = None) -> dict[str, Any]:
    """The JSON object kept under `name`, or an empty one where there is none that can be trusted and parsed."""
    directory = directory or config_dir()
    if problem_with(directory) is not None:
        return {}
    path = directory / name
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            return {}
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            return {}
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def update(name: str, change: Callable[[dict[str, Any]], None], directory: Path | None = None) -> Path:
    """Read the object under `name`, let `change` edit it in place, and put it back whole; returns the path written.

    One writer at a time (a lock file beside it); readers see the old file or the new one, never half of either.
    Raises UnsafeDirectory where the directory is not private to this user, OSError where it cannot be written.
    """
    import filelock

    directory = directory or config_dir()
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700, parents=True)
    problem = problem_with(directory)
    if problem is not None:
        raise UnsafeDirectory(f"{directory} is not used: {problem}.")
    path = directory / name
    with filelock.FileLock(str(path) + ".lock", timeout=_LOCK_SECONDS):
        content = read(name, directory)
        change(content)
        write_json(path, content)
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
