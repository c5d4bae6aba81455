"""The commands that measure for later: `autotune`, `record`, and the sweep behind `bench --cases sweep`.

Parses, calls, prints. Heavy imports stay inside the commands.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ffpa_hf import cli_results

if TYPE_CHECKING:
    import torch

    from ffpa_hf.bench.cases import Case
    from ffpa_hf.call import AttentionCall
    from ffpa_hf.cli_results import Wanted
    from ffpa_hf.kernels.tuning.tiles import Bucket
    from ffpa_hf.report import Report

_SWEEP_SECONDS = 0.2
_MOST_JOBS = 14
_WORTH_WORKERS = 4  # with fewer, starting processes takes longer than it saves


# --- the sweep --------------------------------------------------------------------------------------------------------


def bench_sweep(
    cases: Sequence[Case],
    providers: list[str],
    name: str,
    output: Path,
    device: torch.device,
    seconds: float | None,
    minutes: float | None,
    check: bool,
    wanted: Wanted,
    jobs: int | None = None,
) -> None:
    """`bench --cases sweep` and `bench --check-auto`: write the results file, print the table, list auto's losers."""
    from ffpa_hf import cli
    from ffpa_hf.bench import results as records
    from ffpa_hf.bench import sweep

    if not all(case.id.startswith("sweep_") for case in cases):
        raise typer.BadParameter("--check-auto runs cases of the sweep.", param_hint="--cases")
    timed = providers or (sweep.PROVIDERS_FOR_CHECK if check else sweep.providers_for_table(device))
    for provider in timed:
        known = provider == "sdpa" or provider.removeprefix("ffpa_hf/") in ("auto", "sdpa", "triton", "cuda", "cute")
        if not known or "sdpa" not in timed:
            text = f"{provider!r}; the sweep times sdpa and ffpa_hf/<auto, sdpa, triton, cuda or cute>."
            raise typer.BadParameter(text, param_hint="--providers")
    gathered = cli._new_results(device)
    default = "auto-check" if check else "sweep"
    path = output / records.file_name(gathered, default if name == "bench" else name)
    begin = time.monotonic()
    left = _run_sweep(cases, timed, gathered, device, (seconds or _SWEEP_SECONDS) / 2, minutes, path, jobs)
    out = cli._console(stderr=wanted.json)
    out.print(sweep.table(gathered))
    out.print(f"{len(cases) - len(left)} cases in {time.monotonic() - begin:.0f} s; results: {path}", soft_wrap=True)
    if left:
        out.print(f"no time left for {len(left)} cases: {', '.join(case.id for case in left)}")
    lost = check and _print_losers(gathered.rows, out)
    cli_results.finish([(path.stem, gathered)], wanted, out)
    if lost or not any(row.ms is not None for row in gathered.rows):
        raise typer.Exit(1)


def compile_ahead(
    cases: Sequence[Case], directions: Any, providers: Sequence[str], device: torch.device, jobs: int | None
) -> float:
    """Fill the caches of compiled kernels for a run of `bench`, in worker processes; the minutes it took."""
    from ffpa_hf.bench import runner

    begin = time.monotonic()
    pairs = sum(not case.host for case in cases) * len(set(providers) & set(runner.COMPILED))
    if device.type == "cuda" and pairs >= _WORTH_WORKERS:
        work = (list(cases), directions, list(providers), str(device))
        _in_workers(runner.warm, work, jobs, f"compiling {pairs} cases and providers")
    return (time.monotonic() - begin) / 60


def _run_sweep(
    cases: Sequence[Case],
    providers: Sequence[str],
    gathered: Any,
    device: torch.device,
    seconds: float,
    minutes: float | None,
    path: Path | None,
    jobs: int | None = None,
) -> list[Case]:
    """Compile ahead in worker processes, then time; the results file grows with each case."""
    from ffpa_hf import cli
    from ffpa_hf.bench import sweep

    begin = time.monotonic()
    for provider in providers if device.type == "cuda" else ():
        if provider.startswith("ffpa_hf/") and provider != "ffpa_hf/sdpa":
            _in_workers(sweep.warm, (list(cases), provider, str(device)), jobs, f"compiling for {provider}")
    spent = (time.monotonic() - begin) / 60
    keep: Callable[[], None] = (lambda: gathered.write(path)) if path is not None else (lambda: None)
    progress, on_step, on_case = cli._bench_progress(gathered, len(cases), keep)
    with progress:
        left = sweep.run(
            cases,
            providers,
            gathered,
            device,
            seconds=seconds,
            minutes=None if minutes is None else max(0.0, minutes - spent),
            on_step=on_step,
            on_case=on_case,
        )
    keep()
    return left


def _print_losers(rows: Sequence[Any], out: Any) -> bool:
    """Every row in which auto is slower than F.sdpa by more than the noise; True where there is one."""
    from ffpa_hf.bench import sweep

    lost = sweep.losers(rows)
    compared = sum(row.provider == "ffpa_hf/auto" and row.speedup_vs_sdpa is not None for row in rows)
    for title, bound in (("", False), (" (launch-bound, in a CUDA graph)", True)):
        some = [row for row in lost if sweep.is_launch_bound(row) == bound]
        out.print(f"auto slower than F.sdpa by more than 3%{title}: {len(some)}")
        for row in some:
            ratio = "no time" if row.speedup_vs_sdpa is None else f"{row.speedup_vs_sdpa:.3f} of SDPA's speed"
            out.print(f"  {row.case} {row.direction}: {ratio}; {row.note}", soft_wrap=True)
    out.print(f"{compared - sum(row.ms is not None for row in lost)} of {compared} timings are not slower")
    return bool(lost)


def _in_workers(work: Callable[..., int], arguments: tuple[Any, ...], jobs: int | None, title: str) -> None:
    """`work(*arguments, index, count)` in `count` processes; failures show when the work is done here."""
    import concurrent.futures
    import contextlib
    import multiprocessing

    count = jobs or max(1, min(_MOST_JOBS, (os.cpu_count() or 2) - 2))
    if count == 1:
        return
    print(f"{title}: {count} processes", file=sys.stderr)
    begin = time.monotonic()
    with concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        done = [pool.submit(work, *arguments, index, count) for index in range(count)]
        ran = 0
        for one in done:
            with contextlib.suppress(Exception):
                ran += one.result()
    print(f"{title}: {ran} runs in {time.monotonic() - begin:.0f} s", file=sys.stderr)


# --- autotune ---------------------------------------------------------------------------------------------------------


def autotune(
    mode: Annotated[str, typer.Option(help="fast: a short list of tiles; max: the whole grid.")] = "fast",
    shapes_from: Annotated[
        Path | None, typer.Option(help="Calls of a recorded run (ffpa-hf record, Report.save); default: a grid.")
    ] = None,
    only: Annotated[str, typer.Option(help="tiles, auto, or both by commas.")] = "tiles,auto",
    device: Annotated[str | None, typer.Option(help="cuda or cuda:1; default: the first GPU.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin nothing later than this; run again to go on.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure what this user's tables have already, too.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile ahead; 1: none.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List what would be measured, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: as JSON.")] = False,
) -> None:
    """Time Triton tiles, then kernels against F.sdpa, on this GPU, and keep both in this user's tables.

    What is in the tables already is left out, so an interrupted run goes on where it stopped. Later calls read the
    tables by themselves: tiles whatever the backend's autotune says, and auto its order of backends.
    """
    from ffpa_hf import cli
    from ffpa_hf.kernels.tuning import recording, store

    if mode not in ("fast", "max"):
        raise typer.BadParameter(f"{mode!r}; use fast or max.", param_hint="--mode")
    if as_json and not list_:
        raise typer.BadParameter("goes with --list; what is measured is kept as JSON tables.", param_hint="--json")
    parts = cli._words(only)
    if not parts or set(parts) - {"tiles", "auto"}:
        raise typer.BadParameter(f"{only!r}; use tiles, auto or both.", param_hint="--only")
    target = cli._device(device)
    try:
        calls = None if shapes_from is None else [call for call, _ in recording.load(shapes_from)]
    except (OSError, ValueError) as problem:
        raise typer.BadParameter(str(problem), param_hint="--shapes-from") from None
    if target.type != "cuda" and not list_:
        print("No GPU here: nothing to tune.")
        raise typer.Exit(2)
    name = cli._probe(target).device_name
    buckets = _buckets(calls, name, mode, again) if "tiles" in parts else []
    cases = _cases(calls, name, again) if "auto" in parts else []
    if list_ and as_json:
        content = {"device": name, "folder": str(store.config_dir())}
        cli._print_json({**content, "tiles": [each.key for each in buckets], "auto": [case.id for case in cases]})
        return
    print(f"{name}: {len(buckets)} buckets of tiles and {len(cases)} shapes for auto to measure; {store.config_dir()}")
    if list_:
        for line in (*(bucket.key for bucket in buckets), *(case.id for case in cases)):
            print(line)
        return
    import torch

    torch.cuda.set_device(target)
    end = None if minutes is None else time.monotonic() + minutes * 60
    unfinished = _tune_tiles(buckets, target, name, mode, end, jobs)
    unfinished += _measure_auto(cases, target, name, end, jobs)
    if unfinished:
        print(f"{unfinished} left for lack of time: the same command goes on with them.")


def _buckets(calls: list[AttentionCall] | None, device_name: str, mode: str, again: bool) -> list[Bucket]:
    """Buckets to tune that this user's table does not have (as thoroughly) yet."""
    from ffpa_hf.kernels.tuning import tiles, triton_tuner

    wanted = triton_tuner.default_buckets() if calls is None else triton_tuner.buckets_of(calls)
    if again:
        return wanted
    left = []
    for bucket in wanted:
        kept = tiles.row(device_name, bucket)
        if kept is None or (mode == "max" and kept[0].get("mode") != "max"):
            left.append(bucket)
    return left


def _cases(calls: list[AttentionCall] | None, device_name: str, again: bool) -> list[Case]:
    """Shapes to measure for auto that this user's table does not have yet."""
    from ffpa_hf.bench import cases as table
    from ffpa_hf.kernels.tuning import preferences

    wanted = table.SWEEP if calls is None else table.sweep_cases_of(calls)
    return [case for case in wanted if again or not preferences.has_own(device_name, case.id)]


def _tune_tiles(
    buckets: list[Bucket], device: torch.device, device_name: str, mode: Any, end: float | None, jobs: int | None
) -> int:
    """Tune and keep bucket by bucket; returns how many are left when the time is over."""
    from ffpa_hf.kernels.triton import choice
    from ffpa_hf.kernels.tuning import tiles, triton_tuner

    if not buckets:
        return 0
    kinds = triton_tuner.without_doubles(buckets)
    _in_workers(triton_tuner.compile_ahead, (kinds, mode, str(device)), jobs, f"compiling {len(kinds)} kinds of tiles")
    progress, on_step, on_bucket = _progress(len(buckets))
    failed = 0
    with progress:
        for index, bucket in enumerate(buckets):
            if end is not None and time.monotonic() > end:
                return len(buckets) - index
            on_step(bucket.key)
            try:
                found = triton_tuner.tune(bucket, device, mode)
                tiles.keep(device_name, bucket, found)
                gain = found["rule_ms"] / found["ms"]
                progress.console.print(
                    f"{bucket.key}: {found['ms']:.4f} ms, {gain:.2f} times the rule's speed, {found['tried']} tried",
                    soft_wrap=True,
                )
            except Exception as problem:
                failed += 1
                progress.console.print(f"{bucket.key}: not tuned ({type(problem).__name__}: {problem})", soft_wrap=True)
            on_bucket()
    choice.forget()
    if failed == len(buckets):
        raise typer.Exit(1)
    return 0


def _measure_auto(
    cases: list[Case], device: torch.device, device_name: str, end: float | None, jobs: int | None
) -> int:
    """Time kernels against SDPA and keep the rows; returns how many cases are left when the time is over."""
    from ffpa_hf import cli
    from ffpa_hf.bench import sweep
    from ffpa_hf.kernels.tuning import preferences

    minutes = None if end is None else (end - time.monotonic()) / 60
    if not cases or (minutes is not None and minutes <= 0):
        return len(cases)
    gathered = cli._new_results(device)
    providers = sweep.providers_for_table(device)
    left = _run_sweep(cases, providers, gathered, device, _SWEEP_SECONDS / 2, minutes, None, jobs)
    rows = preferences.rows_from((row.case, row.direction, row.provider, row.ms) for row in gathered.rows)
    out = cli._console()
    out.print(sweep.table(gathered, chosen=providers[-1]))
    if rows:
        path = preferences.keep(device_name, rows)
        out.print(f"{len(rows)} shapes kept in {path}", soft_wrap=True)
    return len(left)


def _progress(total: int) -> tuple[Any, Callable[[str], None], Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task("", total=total)
    return (
        progress,
        lambda text: progress.update(task, description=text),
        lambda: progress.advance(task),
    )


# --- record -----------------------------------------------------------------------------------------------------------


def record(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script, or with -m a module; its own arguments follow.")],
    output: Annotated[Path, typer.Option(help="Where the calls are written.")] = Path("ffpa_hf_calls.json"),
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False,
    time_: Annotated[
        bool, typer.Option("--time", help="Then time the recorded 16-bit shapes by SDPA and by each of our kernels.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the calls as JSON at the end; the program's own output precedes it.")
    ] = False,
) -> None:
    """Run a Python program and write down its attention calls: shapes, masks, how often, served by what and why.

    The file is what `autotune --shapes-from` takes. With --time, the shapes are timed afterwards, and it is said what
    would be faster than what ran.
    Options of record come before SCRIPT. Calls inside torch.compile are not seen: record an uncompiled run. The exit
    code is the program's.
    """
    import runpy

    import ffpa_hf
    from ffpa_hf import cli
    from ffpa_hf.report import reset

    reset()
    before = sys.argv, list(sys.path)
    sys.argv = [script, *context.args]
    code: Any = 0
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            if not Path(script).is_file():
                raise typer.BadParameter(f"{script} is no file.", param_hint="SCRIPT")
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        code = left.code
    finally:
        sys.argv, sys.path[:] = before
        found = ffpa_hf.report()
        if len(found):
            found.save(output)
    print(found, file=sys.stderr)
    print(f"calls written to {output}" if len(found) else "no attention call went through ffpa_hf", file=sys.stderr)
    timed = _time_recorded(found) if time_ else []
    for line in timed:
        print(_words_of(line), file=sys.stderr)
    if as_json:
        names = ("shape", "backend", "backward", "reason", "calls")
        rows = [{name: getattr(row, name) for name in names} for row in found]
        cli._print_json({"output": str(output) if len(found) else None, "rows": rows, "timed": timed})
    if isinstance(code, str):
        print(code, file=sys.stderr)
    raise typer.Exit(code if isinstance(code, int) else 0 if code is None else 1)


def _time_recorded(found: Report) -> list[dict[str, Any]]:
    """For each recorded shape: what ran, how long that takes, what is fastest and how long that takes, in ms a call.

    Times are of the sweep's calls: random values, masks of the same kind. Where a call needed gradients, its forward
    and backward count together.
    """
    import torch

    from ffpa_hf import cli
    from ffpa_hf.bench import sweep
    from ffpa_hf.bench.cases import sweep_cases_of

    ran: dict[tuple[str, str], dict[str, Any]] = {}
    cases: dict[str, Case] = {}
    for row in found:
        if row.call is None:
            continue
        for q_len, kv_len, calls in row.lengths:
            call = replace(row.call, q_len=q_len, kv_len=kv_len)
            for case in sweep_cases_of([call]):
                cases[case.id] = case
                entry = {"case": case.id, "direction": "fwd+bwd" if call.needs_grad else "fwd", "backend": row.backend}
                ran.setdefault((case.id, entry["direction"]), {**entry, "calls": 0})["calls"] += calls
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    gathered = cli._new_results(device)
    providers = sweep.providers_for_table(device)
    _run_sweep(list(cases.values()), providers, gathered, device, _SWEEP_SECONDS / 2, None, None)
    times: dict[tuple[str, str], dict[str, float]] = {}
    for timed in gathered.rows:
        if timed.ms is not None:
            name = timed.provider.removeprefix("ffpa_hf/")
            known = times.setdefault((timed.case, timed.direction), {})
            known[name] = min(timed.ms, known.get(name, timed.ms))  # SDPA by itself and through us are one way
    lines = []
    for key, entry in ran.items():
        by = times.get(key, {})
        fastest = min(by, key=lambda name: by[name]) if by else None
        more = {"ms": by.get(entry["backend"]), "fastest": fastest, "fastest_ms": by[fastest] if fastest else None}
        lines.append({**entry, **more})
    return sorted(lines, key=lambda line: -(line["ms"] or 0.0) * line["calls"])


def _words_of(line: dict[str, Any]) -> str:
    """One timed shape in words; a gain within the noise is none."""
    from ffpa_hf.kernels.tuning.preferences import NOISE

    ms, fastest, best = line["ms"], line["fastest"], line["fastest_ms"]
    text = f"{line['case']} {line['direction']}, {line['calls']} calls by {line['backend']}"
    if ms is None or best is None:
        return f"{text}: not timed"
    if fastest == line["backend"] or ms < NOISE * best:
        return f"{text}: {ms:.4g} ms each, nothing is faster"
    return f"{text}: {ms:.4g} ms each; {fastest} would take {best:.4g} ms"
