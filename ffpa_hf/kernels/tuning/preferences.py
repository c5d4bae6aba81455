"""Which backend auto tries first, from measurements on each GPU model: tables of JSON, read by thresholds.

A table holds single measured shapes (`points`). Between them a kernel is chosen only where it holds its own at every
neighbouring point, so what was not measured is decided by the slower side. Knows no kernel; asks no device.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ffpa_hf.kernels import qualification
from ffpa_hf.kernels.tuning import constant_under_compile, store, tables_changed

if TYPE_CHECKING:
    from ffpa_hf.call import AttentionCall

#: A kernel is chosen where it takes at most this many times SDPA's time, forward and forward plus backward.
NOISE = 1.03
#: Query lengths below this decode: one class, whatever their number.
DECODE = 8
#: From this ratio of key to query lengths on (or the other way round), a call is a class of its own.
UNEVEN = 4
#: torch's fast kernels end at this head dim: nothing is concluded from one side of it for the other.
_TORCH_HEAD_DIM = 256
#: Where the shortest measured length is at most this, shorter calls are SDPA's: a launch is most of their time.
_SHORT = 512
_TABLES = Path(__file__).parent / "tables"
#: Mask kind of a call, as the tables name what was measured. Additive masks are decided by rule (`dispatch`).
_MASKS = {"none": "none", "causal": "causal", "intervals": "intervals", "bool": "bool"}
#: The mask classes under which measured cases count: both kinds of intervals must be served well.
_MEASURED = {"none": "none", "causal": "causal", "window": "intervals", "padded": "intervals", "bool": "bool"}


class Class(NamedTuple):
    """Calls whose measurements are compared with each other. relation: "self", "more keys", "more queries", "decode".

    grouped: query heads share key heads.
    """

    mask: str
    grouped: bool
    relation: str


@dataclass(frozen=True)
class Step:
    """From lengths u and v on, backends in this order; None where nothing can be said.

    u, v: the shorter length and 0 ("self"); queries and keys ("more keys"); keys and queries ("more queries"); keys
    and 0 ("decode").
    """

    u: int
    v: int
    order: tuple[str, ...] | None


@dataclass(frozen=True)
class Lanes:
    """Calls of at most `most` batched query heads (and more than the entry before)."""

    most: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Band:
    """Head dims up to `head_dim` (and above the band before)."""

    head_dim: int
    lanes: tuple[Lanes, ...]


Table = dict[Class, tuple[Band, ...]]


# --- asking -----------------------------------------------------------------------------------------------------------


def prefer(call: AttentionCall) -> tuple[str, ...] | None:
    """Backends for a call, best first, SDPA among them; None where nothing like it was measured on this GPU model.

    Compares whole numbers with thresholds only, so it may run while torch.compile traces.
    """
    if call.device_type != "cuda" or call.dropout_p > 0 or call.has_bias:
        return None
    if call.dtype != torch.bfloat16 and call.dtype != torch.float16:
        return None
    if call.sdpa_expresses() is not None:
        return None  # SDPA's time was measured where F.sdpa can give the result
    mask = _MASKS.get("causal" if call.is_causal else call.mask_kind)
    if mask is None:
        return None
    q_len, kv_len, lanes = call.q_len, call.kv_len, call.batch * call.q_heads
    u, v, relation = q_len if q_len <= kv_len else kv_len, 0, "self"
    if q_len < DECODE:
        u, relation = kv_len, "decode"
    elif kv_len >= UNEVEN * q_len:
        u, v, relation = q_len, kv_len, "more keys"
    elif q_len >= UNEVEN * kv_len:
        u, v, relation = kv_len, q_len, "more queries"
    grouped = call.q_heads != call.kv_heads
    order = _ask(call.device_name, mask, grouped, relation, call.head_dim, lanes, u, v)
    if order is None and (relation == "more keys" or relation == "more queries"):
        order = _ask(call.device_name, mask, grouped, "self", call.head_dim, lanes, u, 0)  # u: the shorter length
    return order


def _ask(
    device_name: str, mask: str, grouped: bool, relation: str, head_dim: int, lanes: int, u: int, v: int
) -> tuple[str, ...] | None:
    """The answer of a class; of the one without groups where grouped heads were not measured."""
    order = None
    if grouped:
        order = lookup(_bands(device_name, mask, True, relation), head_dim, lanes, u, v)
    if order is None:
        order = lookup(_bands(device_name, mask, False, relation), head_dim, lanes, u, v)
    return order


def lookup(bands: tuple[Band, ...], head_dim: int, lanes: int, u: int, v: int) -> tuple[str, ...] | None:
    """The order of the last step not beyond u and v, in the first band and lanes that cover a call."""
    for band in bands:
        if head_dim <= band.head_dim:
            for entry in band.lanes:
                if lanes <= entry.most:
                    order = None
                    for step in entry.steps:
                        if u >= step.u and v >= step.v:
                            order = step.order
                    return order
            return None
    return None


@constant_under_compile
def _bands(device_name: str, mask: str, grouped: bool, relation: str) -> tuple[Band, ...]:
    if device_name not in _loaded:
        _loaded[device_name] = compact(rows_of(device_name))
    return _loaded[device_name].get(Class(mask, grouped, relation), ())


_loaded: dict[str, Table] = {}


def has_table(device_name: str) -> bool:
    """Whether anything was measured on this GPU model."""
    return bool(rows_of(device_name))


def forget() -> None:
    """Read the tables again at the next question."""
    _loaded.clear()
    tables_changed()


# --- files ------------------------------------------------------------------------------------------------------------


def _user_file(device_name: str) -> str:
    return f"auto-{store.slug(device_name)}.json"


def _section() -> str:
    """Where this user's rows of the present kernels are; SDPA's part of a row depends on torch."""
    hashes = " ".join(qualification.source_hash(family) for family in qualification.FAMILIES)
    return f"{hashes} torch {torch.__version__}"


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("mask", "grouped", "head_dim", "lanes", "q_len", "kv_len"))


def rows_of(device_name: str) -> list[dict[str, Any]]:
    """Measured rows of a GPU model: this user's (of the present kernels and torch) over the shipped ones."""
    kept = store.read(_user_file(device_name)).get(_section())
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (*_shipped(device_name), *(kept if isinstance(kept, list) else ())):
        if _is_row(row):
            rows[_place(row)] = row
    return list(rows.values())


def _shipped(device_name: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads((_TABLES / f"{store.slug(device_name)}.json").read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return rows if isinstance(rows, list) else []


def _is_row(row: Any) -> bool:
    """Whether a row has what it needs; a damaged one counts as not measured."""
    try:
        whole = all(type(row[name]) is int and row[name] > 0 for name in ("head_dim", "lanes", "q_len", "kv_len"))
        timed = [len(pair) == 2 and min(pair) > 0 for pair in row["speedups"].values()]
        return whole and row["mask"] in _MEASURED and type(row["grouped"]) is bool and bool(timed) and all(timed)
    except (TypeError, KeyError, AttributeError):
        return False


def keep(device_name: str, rows: Sequence[dict[str, Any]]) -> Path:
    """Add measured rows to this user's table, over older ones of the same shapes; returns the file.

    Raises OSError (UnsafeDirectory where others could write there) if they cannot be kept.
    """
    section = _section()

    def change(content: dict[str, Any]) -> None:
        kept = content.get(section)
        merged = {_place(row): row for row in (kept if isinstance(kept, list) else ()) if _is_row(row)}
        merged.update({_place(row): row for row in rows})
        content[section] = list(merged.values())

    path = store.update(_user_file(device_name), change)
    forget()
    return path


def has_own(device_name: str, case_id: str) -> bool:
    """Whether this user's table has a case already, so that an interrupted run can go on."""
    kept = store.read(_user_file(device_name)).get(_section())
    place = _place_of(case_id)
    return place is not None and any(_is_row(row) and _place(row) == place for row in kept or ())


# --- from points to thresholds ----------------------------------------------------------------------------------------

#: head dim -> lanes -> u -> v -> speedups of every measurement there
_Points = dict[int, dict[int, dict[int, dict[int, list[dict[str, Sequence[float]]]]]]]


def _class_of(row: dict[str, Any]) -> tuple[Class, int, int]:
    """(class, u, v) of a measured row; the counterpart of what `prefer` does with a call."""
    q_len, kv_len = row["q_len"], row["kv_len"]
    u, v, relation = min(q_len, kv_len), 0, "self"
    if q_len < DECODE:
        u, relation = kv_len, "decode"
    elif kv_len >= UNEVEN * q_len:
        v, relation = kv_len, "more keys"
    elif q_len >= UNEVEN * kv_len:
        v, relation = q_len, "more queries"
    return Class(_MEASURED[row["mask"]], row["grouped"], relation), u, v


def compact(rows: Iterable[dict[str, Any]]) -> Table:
    """Thresholds from measured rows.

    A row: mask, grouped, head_dim, lanes, q_len, kv_len, and `speedups`: backend -> [forward, forward+backward] over
    SDPA. On a measured value the row itself counts; between two values both neighbours do, on every axis; beyond the
    largest length or number of heads the last one; below the smallest, or above the largest head dim, none.
    """
    classes: dict[Class, _Points] = defaultdict(dict)
    for row in rows:
        which, u, v = _class_of(row)
        heads = classes[which].setdefault(row["head_dim"], {}).setdefault(row["lanes"], {})
        heads.setdefault(u, {}).setdefault(v, []).append(row["speedups"])
    return {which: tuple(_head_dims(points)) for which, points in classes.items()}


def _head_dims(points: _Points) -> Iterator[Band]:
    small = sorted(d for d in points if d <= _TORCH_HEAD_DIM)
    large = sorted(d for d in points if d > _TORCH_HEAD_DIM)
    for measured, last in ((small, _TORCH_HEAD_DIM), (large, None)):
        for index, head_dim in enumerate(measured):
            below = [points[d] for d in measured[max(0, index - 1) : index + 1]]
            yield Band(head_dim - 1, tuple(_all_lanes(below)))  # between two, or below the first
            yield Band(head_dim, tuple(_all_lanes([points[head_dim]])))
        if last is not None and last not in measured:
            yield Band(last, ())


def _all_lanes(corners: list[Any]) -> Iterator[Lanes]:
    """Thresholds of the number of heads, where all `corners` (lanes -> u -> v) must agree on a kernel."""
    measured = sorted({lanes for corner in corners for lanes in corner})
    for lanes in measured:
        yield from _lanes(corners, lanes - 1)  # between two; or fewer than were ever measured
        yield from _lanes(corners, lanes)
    yield from _lanes(corners, measured[-1] + 1, most=1 << 62)


def _lanes(corners: list[Any], lanes: int, most: int | None = None) -> Iterator[Lanes]:
    found = []
    for corner in corners:
        near = _neighbours(corner, lanes)
        if near is None:
            found = []
            break
        found += near
    yield Lanes(most or lanes, tuple(_steps(found)) if found else ())


def _neighbours(values: dict[int, Any], at: int) -> list[Any] | None:
    """What was measured at a value, or at the nearest on both sides (one, beyond the largest); None below the least."""
    below = max((value for value in values if value <= at), default=None)
    above = min((value for value in values if value >= at), default=None)
    if below is None:
        return None
    return [values[value] for value in sorted({below, below if above is None else above})]


def _steps(corners: list[Any]) -> Iterator[Step]:
    """Thresholds of u and v, where all `corners` (u -> v -> speedups) must agree on a kernel."""
    previous: list[Step] = []
    for u in (0, *sorted({at for corner in corners for least in corner for at in (least, least + 1)})):
        block: list[Step] = []
        near = [_neighbours(corner, u) for corner in corners]
        if any(found is None for found in near):
            known = [set(corner) for corner, found in zip(corners, near, strict=True) if found is None]
            short = all(min(lengths) <= _SHORT for lengths in known)
            block.append(Step(u, 0, ("sdpa", *_names(corners)) if short else None))
        else:
            keys = [one for found in near for one in found or ()]
            for v in (0, *sorted({at for corner in keys for least in corner if least for at in (least, least + 1)})):
                measured = [_neighbours(corner, v) for corner in keys]
                missing = any(found is None for found in measured)
                speedups = [one for found in measured for many in found or () for one in many]
                order = None if missing else _order(speedups)
                if not block or block[-1].order != order:
                    block.append(Step(u, v, order))
        if [(step.v, step.order) for step in block] != [(step.v, step.order) for step in previous]:
            yield from block
        previous = block


def _names(corners: Any) -> list[str]:
    found = {
        name for corner in corners for at in corner.values() for many in at.values() for one in many for name in one
    }
    return sorted(found)


def _order(speedups: list[dict[str, Sequence[float]]]) -> tuple[str, ...]:
    """Kernels that are slower nowhere in neither direction, fastest both ways first; then SDPA; then the rest."""
    floor = 1.0 / NOISE
    everywhere = [name for name in speedups[0] if all(name in one for one in speedups)]
    ranked = sorted(everywhere, key=lambda name: -min(one[name][1] for one in speedups))
    good = [name for name in ranked if min(min(one[name]) for one in speedups) >= floor]
    rest = [name for name in ranked if name not in good]
    rest += sorted({name for one in speedups for name in one} - set(ranked))
    return (*good, "sdpa", *rest)


# --- building ---------------------------------------------------------------------------------------------------------

#: How the sweep names a shape: everything that a row needs.
_CASE = re.compile(
    r"sweep_d(?P<head_dim>\d+)_h(?P<lanes>\d+)_g(?P<group>\d+)_q(?P<q_len>\d+)_k(?P<kv_len>\d+)_(?P<mask>[a-z]+)"
)


def _place_of(case_id: str) -> tuple[Any, ...] | None:
    match = _CASE.fullmatch(case_id)
    if match is None or match["mask"] not in _MEASURED:
        return None
    sizes = (int(match[name]) for name in ("head_dim", "lanes", "q_len", "kv_len"))
    return match["mask"], int(match["group"]) > 1, *sizes


def rows_from(timed: Iterable[tuple[str, str, str, float | None]]) -> list[dict[str, Any]]:
    """Rows from timings (case, direction, provider, ms) of the sweep, where both directions were measured.

    A kernel is compared with the route that auto would take instead: `ffpa_hf/sdpa` where that was timed (it may have
    to make a mask or expand keys), else `sdpa`. Later timings win.
    """
    times = {(case, direction, provider): ms for case, direction, provider, ms in timed if ms is not None}
    backends = sorted({p.removeprefix("ffpa_hf/") for _, _, p in times if p.startswith("ffpa_hf/")} - {"auto", "sdpa"})
    rows = []
    for case in sorted({case for case, _, _ in times}):
        place = _place_of(case)
        base = _both_ways(times, case, "ffpa_hf/sdpa") or _both_ways(times, case, "sdpa")
        if place is None or base is None:
            continue
        speedups = {}
        for backend in backends:
            mine = _both_ways(times, case, f"ffpa_hf/{backend}")
            if mine is not None:
                speedups[backend] = [round(theirs / ours, 3) for theirs, ours in zip(base, mine, strict=True)]
        if speedups:
            names = ("mask", "grouped", "head_dim", "lanes", "q_len", "kv_len")
            rows.append({**dict(zip(names, place, strict=True)), "speedups": speedups})
    return sorted(rows, key=_place)


def build(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A table's file content from results files of the sweep, all of one device; later files win.

    Raises ValueError where the devices differ or nothing can be used.
    """
    devices = {content["device"] for content in results}
    if len(devices) != 1:
        raise ValueError(f"results of one device are needed, not of {', '.join(sorted(devices)) or 'none'}.")
    timed = [
        (row["case"], row["direction"], row["provider"], row["ms"]) for content in results for row in content["rows"]
    ]
    rows = rows_from(timed)
    if not rows:
        raise ValueError("no sweep case has sdpa and one of our kernels in both directions.")
    last = results[-1]
    return {
        "device": last["device"],
        "date": last["date"],
        "command": last["command"],
        "versions": last["versions"],
        "sources": {family: qualification.source_hash(family) for family in qualification.FAMILIES},
        "rows": rows,
    }


def _both_ways(times: dict[tuple[str, str, str], float], case: str, provider: str) -> tuple[float, float] | None:
    """Forward, and forward plus backward, in ms."""
    forward, backward = times.get((case, "fwd", provider)), times.get((case, "bwd", provider))
    both = times.get((case, "fwd+bwd", provider))
    if forward is None or (both is None and backward is None):
        return None
    return forward, both if both is not None else forward + (backward or 0.0)


def describe(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The thresholds of a table, a line for each class, band and number of heads that says anything."""
    for which, bands in sorted(compact(rows).items()):
        for band in bands:
            for entry in band.lanes:
                words = "; ".join(
                    f"from {step.u}{f' x {step.v}' if step.v else ''}: {', '.join(step.order or ('by rule',))}"
                    for step in entry.steps
                )
                heads = f"heads<={entry.most}" if entry.most < 1 << 62 else "more heads"
                group = " grouped" if which.grouped else ""
                if words:
                    yield f"{which.mask}{group}, {which.relation}, D<={band.head_dim}, {heads}: {words}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build a GPU model's table of automatic choices from results of `ffpa-hf bench --cases sweep --name sweep`."""
    parser = argparse.ArgumentParser(prog="python -m ffpa_hf.kernels.tuning.preferences", description=main.__doc__)
    parser.add_argument("--from", dest="results", type=Path, nargs="+", required=True, metavar="RESULTS")
    parser.add_argument("--tables", type=Path, default=_TABLES, help="folder to write to (default: the shipped one)")
    given = parser.parse_args(arguments)
    try:
        contents = [json.loads(path.read_text(encoding="utf-8")) for path in given.results]
        table = build(contents)
        path = given.tables / f"{store.slug(table['device'])}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_json(path, table)
    except (OSError, ValueError, KeyError) as problem:
        print(f"no table: {problem}", file=sys.stderr)
        return 1
    for line in describe(table["rows"]):
        print(line)
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
