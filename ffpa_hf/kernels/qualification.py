"""Which kernels may run where: the verdicts we ship, and those of this user's own self-tests.

A shipped verdict belongs to one state of a kernel family's sources (the test suite fails when they differ); a user's
belongs to a GPU model, the sources and the compiler. Reads files; imports no kernel and asks no device.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

import torch

from ffpa_hf.kernels.tuning import constant_under_compile, store, tables_changed

#: Kernel families that can be qualified, each on its own: a folder, or some files of one. "triton" is attention,
#: "triton-qkv" what runs between the projections and attention; "cuda-fp8" is attention on codes of eight bits.
FAMILIES: tuple[str, ...] = ("triton", "triton-qkv", "cuda", "cuda-fp8", "cute")
_FOLDERS = {"triton-qkv": "triton", "cuda-fp8": "cuda"}
_OWN_FILES: dict[str, tuple[str, ...]] = {
    "triton-qkv": ("qkv_kernels.py",),
    "cuda-fp8": (
        "fp8.py", "fp8_configs.py", "fp8_launch.py", "fp8.cuh", "fp8_call.cuh", "fp8_hopper.cuh",
        "fp8_statistics.cu", "fp8_finish.cu", "fp8_codes.cu", "fp8_forward.cu",
    ),
}  # fmt: skip
#: Files of the folder's other families that a family is built from too.
_SHARED_FILES: dict[str, tuple[str, ...]] = {
    "cuda-fp8": ("ptx.cuh", "call.cuh", "hopper.cuh", "wgmma.cuh", "launch.py", "program.py"),
}
#: Distributions that compile the kernels of a folder, first found wins.
_COMPILERS = {
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows"),
    "cuda": ("nvidia-cuda-nvrtc",),
    "cute": ("nvidia-cutlass-dsl",),
}
#: Targets that a family's portable sources are kin on, once they ran on one (CUDA C++: the `native` forward).
_PORTABLE = {"cuda": ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120")}
_SHIPPED = Path(__file__).parent / "tuning" / "verdicts.json"
_USER_FILE = "verdicts.json"

Level = Literal["run", "kin", "unrun", "self_tested"]


class Verdict(NamedTuple):
    """level: "run" (we ran it on this target), "kin" (the same source ran on a target like it), "self_tested" (this
    user's self-test passed on this GPU), or "unrun", which keeps a kernel off. text: the level in words."""

    level: Level
    text: str

    @property
    def qualified(self) -> bool:
        """Whether the kernel may run without being asked to prove itself first."""
        return self.level != "unrun"


def target_name(capability: Sequence[int] | None, is_rocm: bool = False) -> str:
    """ "sm_90" for (9, 0); "rocm" for every AMD target."""
    if is_rocm:
        return "rocm"
    if capability is None:
        return "cpu"
    return f"sm_{capability[0]}{capability[1]}"


@functools.cache
def source_hash(family: str) -> str:
    """Hash of every source and data file of a kernel family, whatever the line endings and the place it is in."""
    folder = Path(__file__).parent / _folder(family)
    own = _OWN_FILES.get(family)
    others = {name for files in _OWN_FILES.values() for name in files} if own is None else set()
    own = None if own is None else own + _SHARED_FILES.get(family, ())
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if own is not None and path.name not in own or path.name in others:
            continue
        if path.suffix in (".py", ".json", ".cu", ".cuh", ".h") and "__pycache__" not in path.parts:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def compiler_version(family: str) -> str:
    """The compiler that builds a family's kernels, as "triton 3.6.0"; "<name> missing" where it is not installed."""
    names = _COMPILERS[_folder(family)]
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{names[0]} missing"


@functools.cache
def shipped() -> dict[str, Any]:
    """The verdicts that come with the package, by family."""
    return json.loads(_SHIPPED.read_text(encoding="utf-8"))


@constant_under_compile
def verdict(family: str, capability: tuple[int, int] | None, is_rocm: bool = False, device_name: str = "") -> Verdict:
    """What is known about a kernel family on a GPU. capability: CUDA compute capability, None in the interpreter.

    Under torch.compile the answer is a constant of the graph. Raises ValueError for an unknown family.
    """
    return _verdict(_known(family), capability, is_rocm, device_name, store.config_dir())


@functools.lru_cache(maxsize=256)
def _verdict(
    family: str, capability: tuple[int, int] | None, is_rocm: bool, device_name: str, directory: Path
) -> Verdict:
    if capability is None:
        return Verdict("run", "the interpreter needs no verdict")
    target = target_name(capability, is_rocm)
    given = _shipped_verdict(family, target)
    kept = store.read(_USER_FILE, directory).get(_key(family, target, device_name))
    if not _is_entry(kept):
        return given
    when = f"{kept['cases']} cases, {kept['date'][:10]}"
    if not kept["passed"]:
        return Verdict("unrun", f"the self-test failed on this GPU ({kept['failed']} of {when})")
    if given.qualified:
        return Verdict(given.level, f"{given.text}; the self-test passed on this GPU ({when})")
    return Verdict("self_tested", f"the self-test passed on this GPU ({when})")


def _shipped_verdict(family: str, target: str) -> Verdict:
    entry = shipped().get(family, {})
    ran: dict[str, Any] = entry.get("ran", {})
    if target in ran:
        facts = ran[target]
        return Verdict(
            "run",
            f"ran on {facts['device']} ({target}) with torch {facts['torch']}, {facts['compiler']}, {facts['date']}",
        )
    cure = f"`ffpa-hf selftest --backend {family}` on this GPU can qualify it"
    if not ran:
        return Verdict("unrun", f"compiled, but these sources have run on no GPU yet; {cure}")
    if target in entry.get("kin", ()):
        return Verdict("kin", f"the same source ran on {', '.join(ran)}; we did not run it on {target}")
    return Verdict("unrun", f"never ran on {target}; {cure}")


def _is_entry(kept: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a kept verdict has the fields it should; a damaged one counts as none."""
    return (
        isinstance(kept, dict)
        and isinstance(kept.get("passed"), bool)
        and isinstance(kept.get("cases"), int)
        and isinstance(kept.get("failed"), int)
        and isinstance(kept.get("date"), str)
    )


def _key(family: str, target: str, device_name: str) -> str:
    return " | ".join((family, device_name, target, source_hash(family), compiler_version(family)))


def keep(
    family: str, capability: tuple[int, int], is_rocm: bool, device_name: str, *, cases: int, failed: int, date: str
) -> Path:
    """Keep the outcome of a self-test for this user; returns the file. A failed one keeps the kernel off.

    Raises OSError (UnsafeDirectory where others could write there) if it cannot be kept.
    """
    entry = {"passed": failed == 0, "cases": cases, "failed": failed, "date": date, "torch": torch.__version__}
    key = _key(_known(family), target_name(capability, is_rocm), device_name)

    def change(content: dict[str, Any]) -> None:
        content[key] = entry

    path = store.update(_USER_FILE, change)
    forget()
    return path


def forget() -> None:
    """Read the verdicts again at the next question."""
    _verdict.cache_clear()
    shipped.cache_clear()
    tables_changed()


def record(results: Path, shipped_path: Path = _SHIPPED) -> str:
    """Take a self-test's results file (`ffpa-hf selftest --output`) into the shipped verdicts; returns what was done.

    Raises ValueError where the run failed, was interpreted, or tested other sources than these.
    """
    content = json.loads(results.read_text(encoding="utf-8"))
    family = _known(content["family"])
    if content["failed"] or not content["cases"]:
        raise ValueError(
            f"{results}: {content['failed']} of {content['cases']} cases failed; only a passed run is recorded."
        )
    if content["target"] == "cpu" or not content["complete"]:
        raise ValueError(f"{results}: only a complete run on a GPU is recorded.")
    if content["source_hash"] != source_hash(family):
        raise ValueError(
            f"{results}: the run tested sources {content['source_hash']}, not {source_hash(family)}; run it again."
        )
    verdicts = json.loads(shipped_path.read_text(encoding="utf-8"))
    kin = list(_PORTABLE.get(family, ()))
    entry = verdicts.setdefault(family, {"source_hash": None, "ran": {}, "kin": kin, "unrun": []})
    if entry["source_hash"] != content["source_hash"]:
        entry["ran"] = {}  # what ran before were other sources
    entry["source_hash"] = content["source_hash"]
    entry["ran"][content["target"]] = {
        "device": content["device"],
        "torch": content["torch"],
        "compiler": content["compiler"],
        "date": content["date"][:10],
        "cases": content["cases"],
        "results": results.name,
    }
    store.write_json(shipped_path, verdicts)
    forget()
    where = f"{content['target']} ({content['device']})"
    return f"{family} on {where}: {content['cases']} cases, sources {content['source_hash']}"


def _folder(family: str) -> str:
    """The folder of `kernels/` that a family's sources are in."""
    return _FOLDERS.get(_known(family), family)


def _known(family: str) -> str:
    if family not in FAMILIES:
        raise ValueError(f"family={family!r} is no kernel family; use one of {', '.join(FAMILIES)}.")
    return family


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m ffpa_hf.kernels.qualification --record RESULTS`, for maintainers after a GPU run."""
    parser = argparse.ArgumentParser(prog="python -m ffpa_hf.kernels.qualification", description=main.__doc__)
    parser.add_argument(
        "--record", type=Path, required=True, metavar="RESULTS", help="file of ffpa-hf selftest --output"
    )
    try:
        print(record(parser.parse_args(arguments).record))
    except (OSError, ValueError, KeyError) as problem:
        print(f"not recorded: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
