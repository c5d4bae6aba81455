"""Which tiles a call gets: a tuned row of its bucket where there is one, else the rules of `configs`.

A choice is made once per bucket and then holds for the whole process, so that a checkpoint's second pass repeats the
first. Asks no device; timing is the business of `kernels/tuning/triton_tuner.py`.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, NamedTuple

import torch

from ffpa_hf.kernels.triton import configs
from ffpa_hf.kernels.tuning import tiles
from ffpa_hf.kernels.tuning.tiles import Bucket, Direction, Mode, Problem

#: Any config of `configs`: what a row's "tiles" are read back into.
Tiles = Any

_FORWARD = ("ForwardConfig", "WideConfig", "DecodeConfig")
_BACKWARD = ("BackwardConfig", "FusedBackwardConfig")
_KINDS: dict[Direction, tuple[str, ...]] = {"forward": _FORWARD, "backward": _BACKWARD}


class Choice(NamedTuple):
    """Tiles of one bucket and the table they come from."""

    tiles: Tiles
    source: str


def tuned(
    direction: Direction,
    problem: Problem,
    target: configs.Target,
    device: torch.device,
    device_name: str,
    autotune: Mode | None = None,
) -> Choice | None:
    """The tuned tiles of a call on a GPU model; None where the rules of `configs` hold.

    autotune: a bucket without a row is timed now on `device`, unless this is no moment for it (a CUDA graph is being
    captured, or a checkpoint runs its forward again). device_name: empty where nothing can have been tuned.
    """
    if not device_name or problem.itemsize != 2:
        return None
    call = (direction, problem, target, device_name, autotune)
    try:
        return _known[call]
    except KeyError:
        pass
    name = (device_name, target, problem.bucket(direction), autotune)
    if name not in _settled:
        if autotune is not None and not _is_time_to_tune(direction):
            return tuned(direction, problem, target, device, device_name)
        _settle(name, device)
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    return _known.setdefault(call, _settled[name])


def _settle(name: _Name, device: torch.device) -> None:
    """Choose for a bucket, once and for all."""
    device_name, target, bucket, autotune = name
    with _lock:
        if name in _settled:
            return
        found = _read(bucket, target, device_name)
        if autotune is not None and not _serves(found, bucket, device_name, autotune):
            from ffpa_hf.kernels.tuning import triton_tuner

            if triton_tuner.tune_now(bucket, device, device_name, autotune):
                found = _read(bucket, target, device_name)
        _settled[name] = found


def by_rule(direction: Direction, problem: Problem, target: configs.Target) -> Tiles:
    """The tiles that `configs` chooses. Raises ValueError where none fit."""
    limits = target.smem_limit, problem.itemsize, target.tma, problem.busy
    if direction == "backward":
        return configs.choose_backward(problem.head_dim, *limits)
    group = problem.q_heads // max(1, problem.kv_heads)
    decode = configs.choose_decode(problem.head_dim, problem.q_len, group, *limits[:2])
    if decode is not None:
        return decode
    lanes, lengths = problem.batch * problem.q_heads, (problem.q_len, problem.kv_len)
    wide = None
    if not target.tensor_memory:
        wide = configs.choose_wide(problem.head_dim, lanes, *lengths, problem.workspace_mb, *limits)
    return wide or configs.choose_forward(problem.head_dim, problem.q_len, *limits, problem.mask == "intervals")


_Name = tuple[str, configs.Target, Bucket, Mode | None]
_settled: dict[_Name, Choice | None] = {}
#: The same by whole calls, so that one look-up serves a call that was seen before.
_known: dict[tuple[Direction, Problem, configs.Target, str, Mode | None], Choice | None] = {}
_MOST_KNOWN = 4096
_lock = threading.RLock()


_epoch = 0


def epoch() -> int:
    """How often choices have been forgotten: what was made with older ones is made anew."""
    return _epoch


def forget() -> None:
    """Choose anew from the tables, for tests and after tuning; running models keep no choice either."""
    global _epoch
    with _lock:
        _epoch += 1
        _settled.clear()
        _known.clear()
    tiles.forget()


def peek(
    direction: Direction, problem: Problem, target: configs.Target, device_name: str, autotune: Mode | None = None
) -> Choice | None:
    """What `tuned` would answer without timing anything, for `explain()`; settles nothing."""
    if not device_name or problem.itemsize != 2:
        return None
    bucket = problem.bucket(direction)
    name = (device_name, target, bucket, autotune)
    return _settled[name] if name in _settled else _read(bucket, target, device_name)


def _is_time_to_tune(direction: Direction) -> bool:
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return False
    # A forward inside a backward pass is a checkpoint's second one, which must do what the first did.
    return direction == "backward" or torch._C._current_graph_task_id() == -1


def _serves(found: Choice | None, bucket: Bucket, device_name: str, mode: Mode) -> bool:
    """Whether a row is as thorough as the mode that is asked for."""
    if found is None:
        return False
    kept = tiles.row(device_name, bucket)
    return mode == "fast" or (kept is not None and kept[0].get("mode") == "max")


def _read(bucket: Bucket, target: configs.Target, device_name: str) -> Choice | None:
    """The row of a bucket, None where there is none that can be understood and is legal on the target."""
    kept = tiles.row(device_name, bucket)
    if kept is None:
        return None
    config = decode(kept[0]["tiles"], _KINDS[bucket.direction])
    if config is None or not configs.is_legal(config, bucket.head_dim, target.smem_limit, 2, target.tma):
        return None
    if bucket.busy and isinstance(config, configs.FusedBackwardConfig):  # its kernel knows ranges only
        return None
    return Choice(config, kept[1])


# --- as JSON ----------------------------------------------------------------------------------------------------------


def encode(config: Tiles) -> dict[str, Any]:
    """A config as JSON: its fields, and its class as "kind"."""
    return {"kind": type(config).__name__, **dataclasses.asdict(config)}


def decode(content: dict[str, Any], kinds: tuple[str, ...] = _FORWARD + _BACKWARD) -> Tiles | None:
    """The config that `encode` wrote; None for anything else, such as fields of another version or no whole numbers."""
    kind = content.get("kind")
    if kind not in kinds:
        return None
    return _build(getattr(configs, kind), {name: value for name, value in content.items() if name != "kind"})


def _build(kind: type, values: Any) -> Tiles | None:
    if not isinstance(values, dict) or set(values) != {field.name for field in dataclasses.fields(kind)}:
        return None
    made = {}
    for field in dataclasses.fields(kind):
        value = values[field.name]
        if field.type in ("int", int):
            if type(value) is not int or value < 0:
                return None
        elif field.type in ("bool", bool):
            if type(value) is not bool:
                return None
        else:
            value = _build(getattr(configs, str(field.type)), value)
            if value is None:
                return None
        made[field.name] = value
    return kind(**made)
