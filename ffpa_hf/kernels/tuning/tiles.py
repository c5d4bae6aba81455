"""Tuned tiles of the Triton kernels: buckets of shapes, and the tables that keep the best tiles of each.

A table belongs to one GPU model and one state of the kernel sources; rows of other sources are ignored. A user's rows
win over the shipped ones. Knows files and plain numbers; what a row's tiles mean is for `kernels/triton/choice.py`.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ffpa_hf.kernels import qualification
from ffpa_hf.kernels.tuning import store, tables_changed

Direction = Literal["forward", "backward"]
Mode = Literal["fast", "max"]
Mask = Literal["none", "causal", "intervals"]

_FAMILY = "triton"
_TABLES = Path(__file__).parent / "tables"
#: Lengths from here on are one bucket, as are batch x heads from `_MOST_LANES` on.
_LONGEST = 16384
_MOST_LANES = 64
_MOST_GROUP = 8
_DECODE = 8


class Bucket(NamedTuple):
    """Calls that share their tiles; also the one shape that is timed for all of them, the least of the bucket.

    lanes: batch times query heads; group: query heads per key head. busy: scores carry more work than a range test (a
    dense mask, bias, soft cap or dropout). workspace_mb: the scratch that was allowed.
    """

    direction: Direction
    head_dim: int
    lanes: int
    group: int
    q_len: int
    kv_len: int
    mask: Mask
    busy: bool
    workspace_mb: int

    @property
    def key(self) -> str:
        """The bucket as a table's key."""
        busy = " busy" if self.busy else ""
        return (
            f"{self.direction} d{self.head_dim} lanes{self.lanes} group{self.group} {self.q_len}x{self.kv_len} "
            f"{self.mask}{busy} {self.workspace_mb}MiB"
        )


class Problem(NamedTuple):
    """What the choice of tiles may depend on: plain numbers of one call, named as in `[B, H, N, D]`."""

    head_dim: int
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    mask: Mask
    busy: bool
    itemsize: int
    workspace_mb: int

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - a tuple of plain numbers holds nothing alive
    def bucket(self, direction: Direction) -> Bucket:
        """The bucket of a call: lengths down to a power of two, batch x heads to a power of four, head dim as it is."""
        group = self.q_heads // max(1, self.kv_heads)
        return Bucket(
            direction,
            self.head_dim,
            lanes=_floor(self.batch * self.q_heads, 2, _MOST_LANES),
            group=_floor(group, 1, _MOST_GROUP),
            q_len=1 if self.q_len < _DECODE else _floor(self.q_len, 1, _LONGEST),
            kv_len=_floor(self.kv_len, 1, _LONGEST),
            mask=self.mask,
            busy=self.busy,
            workspace_mb=self.workspace_mb,
        )


def _floor(number: int, bits: int, most: int) -> int:
    """The largest power of 2**bits that is at most `number` (1 at least) and at most `most`."""
    exponent = (min(max(number, 1), most).bit_length() - 1) // bits * bits
    return 1 << exponent


# --- tables -----------------------------------------------------------------------------------------------------------


def _user_file(device_name: str) -> str:
    return f"{_FAMILY}-{store.slug(device_name)}.json"


def _section() -> str:
    """Where this user's rows of the present kernels are: what compiled is part of what was timed."""
    return f"{qualification.source_hash(_FAMILY)} {qualification.compiler_version(_FAMILY)}"


@functools.lru_cache(maxsize=16)
def _user_rows(device_name: str, directory: Path) -> dict[str, Any]:
    return _rows(store.read(_user_file(device_name), directory).get(_section()))


@functools.lru_cache(maxsize=16)
def _shipped_rows(device_name: str, tables: Path) -> dict[str, Any]:
    try:
        content = json.loads((tables / _user_file(device_name)).read_text(encoding="utf-8"))
        current = content["source_hash"] == qualification.source_hash(_FAMILY)
        return _rows(content["rows"]) if current else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _rows(found: Any) -> dict[str, Any]:
    """Rows that have tiles; anything else in a damaged file counts as not there."""
    if not isinstance(found, dict):
        return {}
    return {key: row for key, row in found.items() if isinstance(row, dict) and isinstance(row.get("tiles"), dict)}


#: Rows of this process, which hold where the user's table cannot be written, too.
_session: dict[tuple[str, str], dict[str, Any]] = {}


def row(device_name: str, bucket: Bucket) -> tuple[dict[str, Any], str] | None:
    """(row, the table it stands in, in words) of a bucket on a GPU model; None where it was never tuned."""
    key = bucket.key
    if (device_name, key) in _session:
        return _session[device_name, key], "this process's own timing"
    found = _user_rows(device_name, store.config_dir()).get(key)
    if found is not None:
        return found, "this user's table"
    found = _shipped_rows(device_name, _TABLES).get(key)
    return None if found is None else (found, "the shipped table")


def counts(device_name: str) -> tuple[int, int]:
    """How many (of this user's, shipped) rows hold on a GPU model with the present kernels."""
    return len(_user_rows(device_name, store.config_dir())), len(_shipped_rows(device_name, _TABLES))


def keep(device_name: str, bucket: Bucket, found: dict[str, Any]) -> Path:
    """Take a row for this process, add it to this user's table and return the file.

    Other sources and compilers have sections of their own there.

    Raises OSError (UnsafeDirectory where others could write there) if it cannot be kept.
    """
    _session[device_name, bucket.key] = found
    tables_changed()
    section = _section()

    def change(content: dict[str, Any]) -> None:
        if not isinstance(content.get(section), dict):
            content[section] = {}
        content[section][bucket.key] = found

    path = store.update(_user_file(device_name), change)
    _user_rows.cache_clear()
    return path


def forget() -> None:
    """Read the tables again at the next question, and drop what this process found."""
    _session.clear()
    _user_rows.cache_clear()
    _shipped_rows.cache_clear()
    tables_changed()


# --- shipping ---------------------------------------------------------------------------------------------------------


def ship(source: Path, device_name: str, date: str, tables: Path = _TABLES) -> Path:
    """Turn a user's file into the table that the package ships for a GPU model; returns the file written.

    Raises ValueError where the file has no row of the present kernels.
    """
    rows = _rows(json.loads(source.read_text(encoding="utf-8")).get(_section()))
    if not rows:
        raise ValueError(f"{source} has no row of the present kernels ({_section()}).")
    content = {
        "device": device_name,
        "date": date[:10],
        "source_hash": qualification.source_hash(_FAMILY),
        "compiler": qualification.compiler_version(_FAMILY),
        "rows": dict(sorted(rows.items())),
    }
    tables.mkdir(parents=True, exist_ok=True)
    path = tables / _user_file(device_name)
    store.write_json(path, content)
    forget()
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Take a table that `ffpa-hf autotune` wrote on some GPU into the package, for maintainers."""
    import datetime

    parser = argparse.ArgumentParser(prog="python -m ffpa_hf.kernels.tuning.tiles", description=main.__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", required=True, help='the GPU model, for instance "NVIDIA H200"')
    parser.add_argument("--tables", type=Path, default=_TABLES, help="folder to write to (default: the shipped one)")
    given = parser.parse_args(arguments)
    try:
        path = ship(given.source, given.device, datetime.date.today().isoformat(), given.tables)
    except (OSError, ValueError, AttributeError) as problem:
        print(f"no table: {problem}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
