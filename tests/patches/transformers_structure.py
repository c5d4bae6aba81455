"""What the source of the installed transformers says about its models, without running any: who dispatches, with which
keywords, and who asks for the name of the implementation. A new release changes here first.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import transformers

_CALL = re.compile(r"\battention_interface\(\n")
_KEYWORD = re.compile(r"^ +(\w+)=", re.MULTILINE)
_TABLE = re.compile(r"^(\w+_CLASSES) = \{\n? *\"eager\"", re.MULTILINE)
_MAKES_MASKS = re.compile(r"\bcreate_(?:bidirectional|causal|chunked|sliding|masks_for_generate)\w*\(")
_NAME_TEST = re.compile(r"_attn_implementation *(?:==|!=|in|not in) *[\[\(\"'][^\n]*")


@functools.cache
def sources() -> dict[str, str]:
    """ "gemma4.modeling_gemma4" -> its source, for every modeling file."""
    root = Path(transformers.__file__).parent / "models"
    return {f"{path.parent.name}.{path.stem}": path.read_text() for path in sorted(root.glob("*/modeling_*.py"))}


@functools.cache
def structure() -> dict[str, list[str]]:
    """Lists of names, sorted, to be compared with those of another release."""
    outside, keywords, tables, names = [], set(), [], []
    for path, source in sources().items():
        dispatches = "ALL_ATTENTION_FUNCTIONS" in source
        if not dispatches and _MAKES_MASKS.search(source):
            outside.append(path)
        for call in _CALL.finditer(source):
            keywords |= set(_KEYWORD.findall(_until_closed(source, call.end())))
        tables += [path for _ in _TABLE.finditer(source)]
        if any("flash" not in test for test in _NAME_TEST.findall(source)):
            names.append(path)
    return {
        "build masks but never dispatch": outside,
        "keywords given to the attention": sorted(keywords),
        "choose an attention class by name": tables,
        "ask for the name of the implementation": names,
    }


def _until_closed(source: str, begin: int) -> str:
    """The arguments of a call whose opening parenthesis stands before `begin`."""
    depth = 1
    for position in range(begin, len(source)):
        depth += {"(": 1, ")": -1}.get(source[position], 0)
        if depth == 0:
            return source[begin:position]
    raise ValueError("a call that never closes")
