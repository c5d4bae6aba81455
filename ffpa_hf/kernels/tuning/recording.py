"""Attention calls of a recorded run (`Report.save`, `ffpa-hf record`), as the tuner wants them.

Knows the file's form; imports no kernel and no device.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ffpa_hf.call import AttentionCall

FORMAT = "ffpa_hf calls"


def load(path: Path) -> list[tuple[AttentionCall, int]]:
    """(call, how often) of a recorded run, most frequent first; equal calls of several modules are one.

    Raises ValueError naming the file and what is wrong with it, OSError where it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        found: dict[AttentionCall, int] = {}
        for row in content["rows"]:
            call = _call(row["call"])
            found[call] = found.get(call, 0) + int(row["calls"])
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path} is no recorded run (Report.save or `ffpa-hf record` make one): {problem!r}") from None
    return sorted(found.items(), key=lambda item: -item[1])


def _call(values: dict[str, Any]) -> AttentionCall:
    known = {field.name for field in fields(AttentionCall)}
    values = {name: value for name, value in values.items() if name in known}
    for name in ("dtype", "bias_dtype"):
        if values.get(name) is not None:
            dtype = getattr(torch, str(values[name]).removeprefix("torch."))
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name}={values[name]!r}")
            values[name] = dtype
    if values.get("capability") is not None:
        values["capability"] = tuple(values["capability"])
    for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim"):
        if type(values[name]) is not int or values[name] < 0:
            raise ValueError(f"{name}={values[name]!r}")
    return AttentionCall(**values)
