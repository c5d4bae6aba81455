"""Every environment variable the library reads, in one table.

Read once at import into one frozen object; tests replace it with `override`. Knows nothing of torch or of kernels.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


def _flag(name: str, text: str) -> bool:
    value = text.strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name}={text!r} is not a switch: use 1 or 0.")


@dataclass(frozen=True)
class Settings:
    """What the environment asked for. One field per variable of `VARIABLES`."""

    cuda_allow_small_d: bool = True
    triton_allow_small_d: bool = True
    cute_allow_small_d: bool = True
    force_no_sdpa_fallback: bool = False
    allow_unqualified: bool = False
    default_backend: str | None = None
    log: str = "warning"
    cache_dir: str | None = None
    triton_interpret: bool = False


#: (environment variable, field of `Settings`, what it does)
VARIABLES: tuple[tuple[str, str, str], ...] = (
    ("FFPA_CUDA_ALLOW_SMALL_D", "cuda_allow_small_d", "0: an explicit CUDA backend leaves head dims up to 256 to SDPA"),
    (
        "FFPA_TRITON_ALLOW_SMALL_D",
        "triton_allow_small_d",
        "0: an explicit Triton backend leaves head dims up to 256 to SDPA",
    ),
    (
        "FFPA_CUTE_ALLOW_SMALL_D",
        "cute_allow_small_d",
        "0: an explicit CuTe-DSL backend leaves head dims up to 256 to SDPA",
    ),
    (
        "FFPA_FORCE_NO_SDPA_FALLBACK",
        "force_no_sdpa_fallback",
        "1: kernels run whenever they can at all, else an error; never SDPA (tests)",
    ),
    ("FFPA_ALLOW_UNQUALIFIED", "allow_unqualified", "1: run kernels that never ran on this kind of GPU"),
    ("FFPA_DEFAULT_BACKEND", "default_backend", "a backend that auto tries first, where it can serve the call"),
    ("FFPA_LOG", "log", "error: no warnings of ffpa_hf; warning (default); debug: every plan is printed, too"),
    ("FFPA_CACHE_DIR", "cache_dir", "where this user's verdicts, tuned tables and compiled kernels are kept"),
    ("TRITON_INTERPRET", "triton_interpret", "1: Triton kernels run on the CPU in Triton's interpreter (tests)"),
)


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Parse `environ`; raises ValueError naming the variable, the value and what is allowed."""
    types = {field.name: field.type for field in fields(Settings)}
    values: dict[str, bool | str | None] = {}
    for variable, field, _ in VARIABLES:
        if variable not in environ:
            continue
        text = environ[variable]
        values[field] = _flag(variable, text) if types[field] == "bool" else (text.strip() or None)
    log = values.get("log", "warning") or "warning"
    if log not in ("error", "warning", "debug"):
        raise ValueError(f"FFPA_LOG={log!r} is not a level: use error, warning or debug.")
    values["log"] = log
    return Settings(**values)  # type: ignore[arg-type]


_current = from_environment()


def current() -> Settings:
    """The settings in force."""
    return _current


def silenced() -> bool:
    """Whether warnings of ours are to stay unsaid (FFPA_LOG=error); errors are raised all the same."""
    return _current.log == "error"


# What patches of diffusers have to say goes through logging, as diffusers' own does.
logging.getLogger("ffpa_hf").addFilter(lambda record: record.levelno >= logging.ERROR or not silenced())


@contextlib.contextmanager
def override(**changes: object) -> Iterator[Settings]:
    """Replace some fields inside a `with` block, for the whole process; for tests and tools.

    Autograd runs a CUDA backward, and what a checkpoint recomputes in it, on a thread of its own, so a variable of one
    context would not reach it.
    """
    global _current
    before = _current
    _current = replace(before, **changes)  # type: ignore[arg-type]
    try:
        yield _current
    finally:
        _current = before
