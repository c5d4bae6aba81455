"""Which backend auto tries first, from measurements on each GPU model: tables of JSON, read by thresholds.

A table is built from results of `ffpa-hf bench --name sweep`. Knows no kernel; asks no device.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ffpa_hf.kernels.tuning import constant_under_compile, store

if TYPE_CHECKING:
    from ffpa_hf.call import AttentionCall

#: A kernel is chosen where it takes at most this many times SDPA's time, forward and forward plus backward.
NOISE = 1.03
#: Query lengths below this decode; tables say nothing of them yet.
_DECODE = 8
_TABLES = Path(__file__).parent / "tables"
#: Mask kind of a call, as the tables name what was measured. Dense masks were not.
_MASKS = {"none": "none", "causal": "causal", "intervals": "window"}


@dataclass(frozen=True)
class Step:
    """From this many query-key rows on (the shorter of Nq and Nkv), backends in this order."""

    length: int
    order: tuple[str, ...]


@dataclass(frozen=True)
class Band:
    """Calls with at least `heads` batched heads, on head dims up to `head_dim` (and above the band before)."""

    head_dim: int
    heads: int
    steps: tuple[Step, ...]


#: mask name -> bands, by head dim rising, then heads falling.
Table = dict[str, tuple[Band, ...]]


def prefer(call: AttentionCall) -> tuple[str, ...] | None:
    """Backends for a call, best first, SDPA among them; None where nothing like it was measured on this GPU model.

    Compares whole numbers with thresholds only, so it may run while torch.compile traces.
    """
    if call.device_type != "cuda" or call.dropout_p > 0 or call.has_bias or call.q_len < _DECODE:
        return None
    if call.dtype != torch.bfloat16 and call.dtype != torch.float16:
        return None
    if call.sdpa_expresses() is not None:
        return None  # SDPA's time was measured where F.sdpa can give the result
    bands = _bands(call.device_name, "causal" if call.is_causal else call.mask_kind)
    return None if bands is None else lookup(bands, call.head_dim, call.batch * call.q_heads, call.q_len, call.kv_len)


def lookup(bands: tuple[Band, ...], head_dim: int, heads: int, q_len: int, kv_len: int) -> tuple[str, ...] | None:
    """The order of the first band covering head dim and heads, at its last step not beyond the shorter length."""
    chosen = None
    for band in bands:
        if head_dim <= band.head_dim and heads >= band.heads:
            chosen = band
            break
    if chosen is None:
        return None
    order = None
    for step in chosen.steps:
        if q_len >= step.length and kv_len >= step.length:
            order = step.order
    return order


@constant_under_compile
def _bands(device_name: str, mask_kind: str) -> tuple[Band, ...] | None:
    mask = _MASKS.get(mask_kind)
    if device_name not in _loaded:
        _loaded[device_name] = load(_TABLES / f"{store.slug(device_name)}.json")
    return None if mask is None else _loaded[device_name].get(mask)


_loaded: dict[str, Table] = {}


def has_table(device_name: str) -> bool:
    """Whether anything was measured on this GPU model."""
    return bool(load(_TABLES / f"{store.slug(device_name)}.json"))


def forget() -> None:
    """Read the tables again at the next question."""
    _loaded.clear()


# --- reading ----------------------------------------------------------------------------------------------------------


def load(path: Path) -> Table:
    """The table in a file; empty where there is none or it is damaged."""
    try:
        return compact(json.loads(path.read_text(encoding="utf-8"))["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def compact(rows: Iterable[dict[str, Any]]) -> Table:
    """Bands of steps from measured rows; a step is kept only where the order changes.

    A row: mask, head_dim, heads, length, and `speedups`: backend -> [forward, forward+backward] over SDPA.
    """
    cells: dict[tuple[str, int, int], dict[int, tuple[str, ...]]] = defaultdict(dict)
    for row in rows:
        cell = cells[str(row["mask"]), int(row["head_dim"]), int(row["heads"])]
        cell[int(row["length"])] = _order(row["speedups"])
    table: dict[str, list[Band]] = defaultdict(list)
    for (mask, head_dim, heads), lengths in sorted(cells.items(), key=lambda item: (item[0][1], -item[0][2])):
        steps: list[Step] = []
        for length in sorted(lengths):
            if not steps or steps[-1].order != lengths[length]:
                steps.append(Step(length, lengths[length]))
        table[mask].append(Band(head_dim, heads, tuple(steps)))
    return {mask: tuple(bands) for mask, bands in table.items()}


def _order(speedups: dict[str, Sequence[float]]) -> tuple[str, ...]:
    """Kernels that are slower in neither direction, fastest both ways first; then SDPA; then the rest."""
    floor = 1.0 / NOISE
    ranked = sorted(speedups, key=lambda name: -speedups[name][1])
    good = [name for name in ranked if min(speedups[name]) >= floor]
    return (*good, "sdpa", *(name for name in ranked if name not in good))


# --- building ---------------------------------------------------------------------------------------------------------

_CASE = re.compile(r"sweep_d(?P<head_dim>\d+)_h(?P<heads>\d+)_(?P<mask>none|causal|window)_n(?P<length>\d+)")


def build(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A table's file content from results files of the sweep, all of one device.

    Rows of `ffpa_hf/<backend>` beside `sdpa` count, where both directions were measured; later files win. Raises
    ValueError where the devices differ or nothing can be used.
    """
    devices = {content["device"] for content in results}
    if len(devices) != 1:
        raise ValueError(f"results of one device are needed, not of {', '.join(sorted(devices)) or 'none'}.")
    times: dict[tuple[str, str, str], float] = {}
    for content in results:
        for row in content["rows"]:
            if row["ms"] is not None:
                times[row["case"], row["direction"], row["provider"]] = row["ms"]
    backends = sorted({p.removeprefix("ffpa_hf/") for _, _, p in times if p.startswith("ffpa_hf/")} - {"auto"})
    rows = []
    for case in sorted({case for case, _, _ in times}):
        match = _CASE.fullmatch(case)
        base = _both_ways(times, case, "sdpa")
        if match is None or base is None:
            continue
        speedups = {}
        for backend in backends:
            mine = _both_ways(times, case, f"ffpa_hf/{backend}")
            if mine is not None:
                speedups[backend] = [round(theirs / ours, 3) for theirs, ours in zip(base, mine, strict=True)]
        if speedups:
            rows.append(
                {
                    "mask": match["mask"],
                    "head_dim": int(match["head_dim"]),
                    "heads": int(match["heads"]),
                    "length": int(match["length"]),
                    "speedups": speedups,
                }
            )
    if not rows:
        raise ValueError("no sweep case has sdpa and one of our kernels in both directions.")
    rows.sort(key=lambda row: (row["mask"], row["head_dim"], row["heads"], row["length"]))
    last = results[-1]
    return {
        "device": last["device"],
        "date": last["date"],
        "command": last["command"],
        "versions": last["versions"],
        "rows": rows,
    }


def _both_ways(times: dict[tuple[str, str, str], float], case: str, provider: str) -> tuple[float, float] | None:
    """Forward, and forward plus backward, in ms."""
    forward, backward = times.get((case, "fwd", provider)), times.get((case, "bwd", provider))
    both = times.get((case, "fwd+bwd", provider))
    if forward is None or (both is None and backward is None):
        return None
    return forward, both if both is not None else forward + (backward or 0.0)


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
        store.write_json(path, table)
    except (OSError, ValueError, KeyError) as problem:
        print(f"no table: {problem}", file=sys.stderr)
        return 1
    steps = compact(table["rows"])
    for mask, bands in steps.items():
        for band in bands:
            words = "; ".join(f"from {step.length}: {', '.join(step.order)}" for step in band.steps)
            print(f"{mask:<7} D<={band.head_dim} heads>={band.heads}: {words}")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
