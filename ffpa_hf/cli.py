"""The command line: `ffpa-hf` and `python -m ffpa_hf`. Parses, calls, prints; computes nothing itself.

Heavy imports stay inside the commands, so that help and wrong arguments answer at once.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ffpa_hf import cli_compile as ahead
from ffpa_hf import cli_results
from ffpa_hf import cli_tuning as tuning

if TYPE_CHECKING:
    import torch

    from ffpa_hf.bench.results import Results
    from ffpa_hf.call import AttentionCall

app = typer.Typer(
    name="ffpa-hf",
    help="Fast exact attention for large head dims inside Hugging Face: what runs here, why, and how fast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_PIPE_WIDTH = 150
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
}
_DTYPES |= {full: full for full in _DTYPES.values()}


def main() -> None:
    """Entry point of the console script."""
    import sys

    from ffpa_hf import settings
    from ffpa_hf.backends import resolve_backend

    try:
        resolve_backend(settings.current().default_backend, "FFPA_DEFAULT_BACKEND")
    except ValueError as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
    app(prog_name="ffpa-hf")


def _console(stderr: bool = False) -> Any:
    """Standard output, or the error stream where JSON goes to the former; wide enough for tables in a file or pipe."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_PIPE_WIDTH)


#: The option that every command has whose outcome another program may want to read.
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, all else on the error stream.")]


def _examples(*lines: str) -> str:
    """The end of a command's help: commands to copy, one a line."""
    return "Examples:\n\n" + "\n\n".join(f"$ {line}" for line in lines)


def _print_json(content: Any) -> None:
    import json

    print(json.dumps(content, indent=1, allow_nan=False, default=str))


# --- info -------------------------------------------------------------------------------------------------------------


@app.command(epilog=_examples("ffpa-hf info", "ffpa-hf info --json > machine.json"))
def info(as_json: Json = False) -> None:
    """Show devices, versions, which backends are on and why, qualified kernels, and where files are kept."""
    from rich.table import Table

    from ffpa_hf import settings
    from ffpa_hf.bench.results import versions
    from ffpa_hf.kernels import compile_cache, qualification
    from ffpa_hf.kernels.tuning import preferences, store, tiles

    console = _console(stderr=as_json)
    content: dict[str, Any] = {}

    def section(name: str, title: str, rows: Sequence[tuple[str, ...]], headings: tuple[str, ...] = ()) -> None:
        content[name] = (
            [dict(zip(headings, row, strict=True)) for row in rows] if headings else {row[0]: row[1] for row in rows}
        )
        if as_json:
            return
        table = Table(*headings, title=title, title_justify="left", show_header=bool(headings), expand=False)
        for _ in range(0 if headings else len(rows[0])):
            table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    devices = _devices()
    rows = []
    for device in devices:
        call = _probe(device)
        target = qualification.target_name(call.capability, call.is_rocm)
        rows.append((str(device), call.device_name, target, _memory(device)))
    section("devices", "Devices", rows, ("device", "name", "target", "memory"))
    section("versions", "Versions", list(versions().items()))

    device = devices[0]
    call = _probe(device)
    title = f"Backends on {device} (by a bf16 call of head dim 512)"
    section("backends", title, _backends(call), ("backend", "state", "why"))
    rows = []
    for family in qualification.FAMILIES:
        if device.type == "cuda":
            verdict = qualification.verdict(family, call.capability, call.is_rocm, call.device_name)
            rows.append((family, verdict.level, verdict.text, _sources(family)))
        else:
            rows.append((family, "-", "no GPU here", _sources(family)))
    section("qualified", f"Qualified kernels on {device}", rows, ("kernels", "class", "ground", "sources"))

    directory = store.config_dir()
    problem = store.problem_with(directory)
    measured = preferences.has_table(call.device_name)
    own, shipped = tiles.counts(call.device_name)
    section(
        "files",
        "Files",
        [
            ("verdicts and tuned tables", str(directory)),
            (
                "state of that folder",
                "nothing kept there yet" if not directory.exists() else problem or "private to this user",
            ),
            ("auto's table of this device", "measured" if measured else "none: auto follows its rules of thumb"),
            ("compiled CUDA kernels", str(compile_cache.directory())),
            ("tuned Triton tiles", f"{own} buckets of this user, {shipped} shipped, for the present kernels"),
        ],
    )
    current = settings.current()
    section(
        "settings",
        "Settings",
        [(variable, str(getattr(current, field)), meaning) for variable, field, meaning in settings.VARIABLES],
        ("variable", "value", "meaning"),
    )
    if as_json:
        _print_json(content)


def _devices() -> list[torch.device]:
    import torch

    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")]


def _memory(device: torch.device) -> str:
    import torch

    if device.type != "cuda":
        return "-"
    return f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"


def _probe(device: torch.device, **changes: Any) -> AttentionCall:
    """A call that kernels are made for, on a device."""
    import torch

    from ffpa_hf.call import AttentionCall, device_facts

    capability, is_rocm, name = device_facts(device)
    fields: dict[str, Any] = {"batch": 1, "q_heads": 8, "kv_heads": 8, "q_len": 4096, "kv_len": 4096}
    fields |= {"head_dim": 512, "value_dim": 512, "dtype": torch.bfloat16}
    fields |= {"device_type": device.type, "capability": capability, "is_rocm": is_rocm, "device_name": name}
    return AttentionCall(**{**fields, **changes})


def _backends(call: AttentionCall) -> list[tuple[str, str, str]]:
    """(backend, on or off, reason) for every backend, as the planner itself answers."""
    from dataclasses import replace

    from ffpa_hf.dispatch import plan

    made = plan(call)
    elsewhere = {}
    if call.device_type != "cuda":  # what a GPU would change, and what it would not
        hopper = replace(call, device_type="cuda", capability=(9, 0), device_name="sm_90")
        elsewhere = {c.backend: c.reason for c in plan(hopper).candidates if not c.accepted}
    rows = []
    for candidate in made.candidates:
        words = candidate.reason
        words += ", auto's choice" if candidate.backend == made.forward else ""
        words += f"; on an sm_90 GPU: {elsewhere[candidate.backend]}" if candidate.backend in elsewhere else ""
        rows.append((candidate.backend, "on" if candidate.accepted else "off", words))
    return rows


def _sources(family: str) -> str:
    from ffpa_hf.kernels import qualification

    current, recorded = qualification.source_hash(family), qualification.shipped().get(family, {}).get("source_hash")
    if recorded is None:
        return f"{current}, no run recorded"
    return current if recorded == current else f"{current}, edited since the recorded run of {recorded}"


# --- explain ----------------------------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "ffpa-hf explain --shape 1,32,8192,512 --causal",
        "ffpa-hf explain --shape 1,32,1,512 --kv-shape 1,4,8192,512 --no-grad",
        "ffpa-hf explain --shape 1,24,4608,128 --backend triton --json",
    )
)
def explain(
    shape: Annotated[str, typer.Option(help="Query's B,H,N,D, for instance 1,32,8192,512.")],
    kv_shape: Annotated[str | None, typer.Option(help="Key's and value's B,H,N,D; default: query's.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64.")] = "bf16",
    causal: Annotated[bool, typer.Option("--causal", help="is_causal=True.")] = False,
    mask: Annotated[str, typer.Option(help="none, bool, additive or intervals.")] = "none",
    dropout: Annotated[float, typer.Option(help="dropout_p.")] = 0.0,
    softcap: Annotated[float | None, typer.Option(help="Soft cap of the scores.")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="With attention sinks.")] = False,
    return_lse: Annotated[bool, typer.Option("--return-lse", help="The log-sum-exp is asked for.")] = False,
    grad: Annotated[bool, typer.Option("--grad/--no-grad", help="Whether gradients are needed.")] = True,
    backend: Annotated[str | None, typer.Option(help="auto, sdpa, triton, cute, cuda, cuda-fp8, cuda-fp4.")] = None,
    forward_backend: Annotated[str | None, typer.Option(help="For the forward alone.")] = None,
    backward_backend: Annotated[str | None, typer.Option(help="For the backward alone.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu; default: the first GPU, else cpu.")] = None,
    as_json: Json = False,
) -> None:
    """Say which kernel a call would run and why the others do not. Runs nothing; exits 1 where the call would raise."""
    import torch

    from ffpa_hf.dispatch import Route, plan

    query = _shape(shape, "--shape")
    key = query if kv_shape is None else _shape(kv_shape, "--kv-shape")
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is no dtype; use one of {', '.join(_DTYPES)}.", param_hint="--dtype")
    if mask not in ("none", "bool", "additive", "intervals"):
        raise typer.BadParameter(f"{mask!r}; use none, bool, additive or intervals.", param_hint="--mask")
    if causal and mask != "none":
        raise typer.BadParameter("a mask and --causal exclude each other.", param_hint="--mask")
    if not 0.0 <= dropout < 1.0:
        raise typer.BadParameter("use 0 <= p < 1.", param_hint="--dropout")
    if softcap is not None and softcap <= 0:
        raise typer.BadParameter("use a number above 0.", param_hint="--softcap")
    if query[0] != key[0] or query[3] != key[3] or key[1] == 0 or query[1] % key[1]:
        text = "batch and head dim must agree with --shape, and query's heads be a multiple of key's."
        raise typer.BadParameter(text, param_hint="--kv-shape")
    kind = torch.bfloat16 if dtype == "bf16" else getattr(torch, _DTYPES[dtype])
    call = _probe(
        _device(device),
        batch=query[0],
        q_heads=query[1],
        kv_heads=key[1],
        q_len=query[2],
        kv_len=key[2],
        head_dim=query[3],
        value_dim=key[3],
        dtype=kind,
        mask_kind=mask,
        has_bias=mask == "additive",
        bias_dtype=kind if mask == "additive" else None,
        is_causal=causal,
        dropout_p=dropout,
        softcap=softcap,
        has_sinks=sinks,
        return_lse=return_lse,
        needs_grad=grad,
    )
    try:
        strict = any(name is not None for name in (backend, forward_backend, backward_backend))
        made = plan(call, Route(backend, forward_backend, backward_backend, strict=strict))
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
    if as_json:
        error = None if made.error is None else f"{type(made.error).__name__}: {made.error}"
        content: dict[str, Any] = {"call": made.call.shape_text(), "error": error}
        if made.error is None:  # nothing runs where the call raises
            content |= {"forward": made.forward, "reason": made.reason, "kernel": made.detail}
            content |= {"backward": made.backward, "backward_reason": made.backward_reason}
        _print_json({**content, "candidates": [candidate._asdict() for candidate in made.candidates]})
    else:
        print(made)
    if made.error is not None:
        raise typer.Exit(1)


def _shape(text: str, option: str) -> tuple[int, int, int, int]:
    try:
        sizes = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if len(sizes) != 4 or min(sizes) < 0:
        raise typer.BadParameter(f"{text!r} is not B,H,N,D, four whole numbers as in 1,32,8192,512.", param_hint=option)
    return sizes  # type: ignore[return-value]


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        return _devices()[0]
    try:
        device = torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(f"{name!r} is no device; use cuda, cuda:1 or cpu.", param_hint="--device") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            found = f"this machine has {count}" if count else "this machine has no GPU that torch can use"
            raise typer.BadParameter(f"{name!r}: {found}.", param_hint="--device")
        return torch.device("cuda", device.index or 0)
    return device


# --- bench ------------------------------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "ffpa-hf bench --cases 'd512_*' --providers sdpa,ffpa_hf/auto",
        "ffpa-hf bench --e2e --minutes 5 --html report.html",
        "ffpa-hf bench --compare old.json new.json",
        "ffpa-hf bench --plot docs/plots benchmarks/results/2026-12-01-h200-kernels.json",
        "ffpa-hf bench --merge a.json b.json --name kernels",
    )
)
def bench(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Results files to merge, compare, draw or show; nothing is timed.")
    ] = None,
    cases: Annotated[str, typer.Option(help="Sets, case ids or globs, by commas.")] = "",
    providers: Annotated[str, typer.Option(help="Providers by commas; default: all that can be imported.")] = "",
    directions: Annotated[str, typer.Option(help="fwd, bwd, fwd+bwd by commas; default: each case's own.")] = "",
    name: Annotated[str, typer.Option(help="Name of the results file: <date>-<gpu>-<name>.json.")] = "bench",
    output: Annotated[Path, typer.Option(help="Folder of the results file.")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu; default: the first GPU, else cpu.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Sampling time per case and direction; default 2, in the sweep 0.2.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no case later than this.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile ahead; 1: none.")] = None,
    check_auto: Annotated[
        bool, typer.Option("--check-auto", help="Auto against F.sdpa over the sweep; every loser is listed.")
    ] = False,
    e2e: Annotated[bool, typer.Option("--e2e", help="Whole models with random weights, sdpa against ours.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Make one file of FILES, parts of one run.")] = False,
    compare: Annotated[Path | None, typer.Option(help="Older results to compare with; exit 1 where worse.")] = None,
    threshold: Annotated[float, typer.Option(help="Percent of time that --compare allows.")] = 5.0,
    plot: Annotated[Path | None, typer.Option(help="Folder for plots as SVG.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for one HTML page with plots and rows.")] = None,
    as_json: Json = False,
    list_: Annotated[bool, typer.Option("--list", help="List cases and providers, and stop.")] = False,
) -> None:
    """Time our kernels beside F.sdpa and the installed peers, all in one run; keep the numbers as JSON.

    Without --cases: the published set on a GPU, cpu_smoke elsewhere. With --e2e: training steps, diffusion passes, an
    autoencoder and generate() at real dimensions on a GPU, tiny twins of them elsewhere; each result is judged before
    it is timed, and the exit code is 1 where one is wrong. With --cases sweep: many shapes at a tenth of a second each,
    for auto's table; with --check-auto: the proof that auto loses nowhere by more than 3%, exit code 1 where it does.

    Exit codes: 1 where something is wrong, slower than --compare allows, or nothing was timed; 2: wrong arguments.
    """
    from ffpa_hf.bench import cases as table
    from ffpa_hf.bench import providers as field

    wanted = cli_results.Wanted(plot, html, compare, threshold, as_json)
    wanted.check()
    if merge:
        files = [cli_results.merge(files or [], name, output)]
    if files:
        if cases or providers or directions or check_auto or e2e:
            text = "results files are not timed: leave out --cases, --providers, --directions, --check-auto and --e2e."
            raise typer.BadParameter(text, param_hint="FILES")
        cli_results.show(files, wanted, _console(stderr=as_json))
        return
    if list_:
        (_list_end_to_end if e2e else _list_bench)(_console())
        return
    import torch

    from ffpa_hf.bench import results as records
    from ffpa_hf.bench import runner

    target = _device(device)
    if e2e:
        if directions:
            raise typer.BadParameter("a model's job has its own directions.", param_hint="--directions")
        _bench_end_to_end(_words(cases), _words(providers), name, output, target, seconds or 2.0, minutes, wanted)
        return
    sets = _words(cases) or (["kernel"] if target.type == "cuda" else ["cpu_smoke"])
    if check_auto and not cases:
        sets = ["sweep" if target.type == "cuda" else "sweep_tiny"]
    try:
        chosen = table.select(sets)
        if check_auto or all(case.id.startswith("sweep_") for case in chosen):
            tuning.bench_sweep(
                chosen, _words(providers), name, output, target, seconds, minutes, check_auto, wanted, jobs
            )
            return
        runners = field.select(_words(providers), target)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
    ways = _words(directions)
    for way in ways:
        if way not in table.DIRECTIONS:
            raise typer.BadParameter(f"{way!r}; use {', '.join(table.DIRECTIONS)}.", param_hint="--directions")
    if target.type == "cuda":
        torch.cuda.set_device(target)
    gathered = _new_results(target)
    path = output / records.file_name(gathered, name)
    spent = tuning.compile_ahead(chosen, ways or None, [each.name for each in runners], target, jobs)
    progress, on_step, on_case = _bench_progress(gathered, len(chosen), lambda: gathered.write(path))
    with progress:
        left = runner.run(
            chosen,
            ways or None,  # type: ignore[arg-type]
            runners,
            gathered,
            target,
            seconds=2.0 if seconds is None else seconds,
            minutes=None if minutes is None else max(0.0, minutes - spent),
            on_step=on_step,
            on_case=on_case,
        )
    _end_bench(gathered, path, [case.id for case in left], wanted)


def _bench_end_to_end(
    cases: list[str],
    providers: list[str],
    name: str,
    output: Path,
    device: torch.device,
    seconds: float,
    minutes: float | None,
    wanted: cli_results.Wanted,
) -> None:
    """`bench --e2e`: also writes where the time went, beside the results, as `<results>-profile.json`."""
    from dataclasses import asdict

    import torch

    from ffpa_hf.bench import end_to_end
    from ffpa_hf.bench import results as records
    from ffpa_hf.kernels.tuning.store import write_json

    try:
        chosen = end_to_end.select(cases or ["e2e" if device.type == "cuda" else "e2e_tiny"])
        timed = end_to_end.select_providers(providers)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    gathered = _new_results(device)
    path = output / records.file_name(gathered, "e2e" if name == "bench" else name)
    progress, on_step, on_case = _bench_progress(gathered, len(chosen), lambda: gathered.write(path))
    with progress:
        left, profiles = end_to_end.run(
            chosen, timed, gathered, device, seconds=seconds, minutes=minutes, on_step=on_step, on_case=on_case
        )
    kernels = {
        case: {run: [asdict(kernel) for kernel in longest] for run, longest in runs.items()}
        for case, runs in profiles.items()
    }
    write_json(path.with_name(f"{path.stem}-profile.json"), {"command": gathered.command, "longest": kernels})
    _end_bench(gathered, path, [case.id for case in left], wanted)
    if end_to_end.wrong(gathered.rows):
        raise typer.Exit(1)


def _new_results(device: torch.device) -> Results:
    import torch

    from ffpa_hf.bench import results as records

    return records.Results(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        date=records.now(),
        command=shlex.join(["ffpa-hf", *sys.argv[1:]]),
        versions=records.versions(),
    )


def _end_bench(gathered: Results, path: Path, left: list[str], wanted: cli_results.Wanted) -> None:
    """Keep and print what was measured, and make what else is wanted; exit code 1 where nothing was measured."""
    from ffpa_hf.bench import results as records

    gathered.write(path)
    out = _console(stderr=wanted.json)
    out.print(records.table(gathered))
    out.print(f"matrix products {gathered.matmul_tflops:.1f} TFLOP/s, copies {gathered.copy_tb_s:.2f} TB/s")
    if left:
        out.print(f"no time left for {len(left)} cases: {', '.join(left)}")
    out.print(f"results: {path}", soft_wrap=True)
    cli_results.finish([(path.stem, gathered)], wanted, out)
    if all(row.ms is None for row in gathered.rows):
        raise typer.Exit(1)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _list_bench(console: Any) -> None:
    from rich.table import Table

    from ffpa_hf.bench import cases as table
    from ffpa_hf.bench import providers as field

    view = Table("set", "case", "shape", "directions")
    for name, members in table.SETS.items():
        if name.startswith("sweep"):
            view.add_row(name, f"{len(members)} cases", "head dims, lengths and masks for auto's table", "fwd, fwd+bwd")
            continue
        for case in members:
            view.add_row(name, case.id, case.text(), ", ".join(case.directions))
    console.print(view)
    console.print("providers: " + ", ".join(provider.name for provider in field.PROVIDERS))


def _list_end_to_end(console: Any) -> None:
    from rich.table import Table

    from ffpa_hf.bench import end_to_end
    from ffpa_hf.bench.models import MODELS

    view = Table("case", "model", "job")
    for case in (*end_to_end.FULL, *end_to_end.TINY):
        view.add_row(case.id, MODELS[case.model].text, case.text)
    console.print(view)
    console.print("providers: " + ", ".join(end_to_end.PROVIDERS))


def _bench_progress(gathered: Results, total: int, keep: Any) -> tuple[Any, Any, Any]:
    """Say what is about to run; (progress bar, callback with the current step, callback after each case).

    All on the error stream.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    progress = Progress(*columns, console=console)
    task = progress.add_task("", total=total)

    def on_case() -> None:
        progress.advance(task)
        keep()

    console.print(f"{gathered.device}; {', '.join(f'{k} {v}' for k, v in gathered.versions.items())}")
    console.print(gathered.command)
    return progress, lambda text: progress.update(task, description=text), on_case


# --- autotune, record -------------------------------------------------------------------------------------------------

app.command(
    epilog=_examples("ffpa-hf autotune --minutes 20", "ffpa-hf autotune --mode max --shapes-from ffpa_hf_calls.json")
)(tuning.autotune)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=_examples(
        "ffpa-hf record train.py --steps 2", "ffpa-hf record --json --output calls.json -m package.program"
    ),
)(tuning.record)

app.command(
    "compile", epilog=_examples("ffpa-hf compile --arch sm_80,sm_90a --head-dims 128,512 --precision bf16,fp16")
)(ahead.compile_kernels)


# --- selftest ---------------------------------------------------------------------------------------------------------


@app.command(epilog=_examples("ffpa-hf selftest", "ffpa-hf selftest --backend triton --only D512 --json"))
def selftest(
    backend: Annotated[str | None, typer.Option(help="One family of kernels; default: every one built.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cuda:1; cpu with TRITON_INTERPRET=1.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Only checks whose description contains this; keeps no verdict.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Also write the outcome as JSON; of several families, as NAME-<family>.json each."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: half the cores, at most 8.")] = None,
    as_json: Json = False,
) -> None:
    """Test our kernels on this GPU against the float64 reference, forward and backward, and keep the verdict.

    Exits 1 where a check fails, 2 where nothing could be tested.
    """
    from ffpa_hf import settings
    from ffpa_hf.kernels import qualification

    console = _console(stderr=as_json)
    families = qualification.FAMILIES if backend is None else (backend,)
    if backend is not None and backend not in qualification.FAMILIES:
        text = f"{backend!r} has no kernels to test; use one of {', '.join(qualification.FAMILIES)}."
        raise typer.BadParameter(text, param_hint="--backend")
    target = _device(device)
    if target.type != "cuda" and not (target.type == "cpu" and settings.current().triton_interpret):
        console.print("No GPU here. TRITON_INTERPRET=1 runs a small grid on the CPU, which qualifies nothing.")
        raise typer.Exit(2)
    failed = False
    contents: list[dict[str, Any]] = []
    tested = False
    for family in families:
        path = output if output is None or len(families) == 1 else output.with_stem(f"{output.stem}-{family}")
        outcome = _selftest_family(family, target, only, path, jobs, console, contents)
        tested = outcome is not None or tested
        failed = bool(outcome) or failed
    if not tested:
        raise typer.Exit(2)
    if as_json:
        _print_json(contents)
    raise typer.Exit(1 if failed else 0)


def _selftest_family(
    family: str,
    target: torch.device,
    only: str | None,
    output: Path | None,
    jobs: int | None,
    console: Any,
    contents: list[dict[str, Any]],
) -> bool | None:
    """Run, print and keep one family's outcome; True where something failed, None where nothing could be
    tested. What was found is appended to `contents`."""
    import os

    import torch
    from rich.console import Console
    from rich.progress import Progress

    from ffpa_hf.bench.results import now
    from ffpa_hf.kernels import qualification
    from ffpa_hf.kernels import selftest as tests
    from ffpa_hf.kernels.tuning import store

    call = _probe(target)
    name = qualification.target_name(call.capability, call.is_rocm)
    compiler = qualification.compiler_version(family)
    console.print(f"{family} on {call.device_name} ({name}), torch {torch.__version__}, {compiler}")
    if compiler.endswith("missing"):
        console.print(f"nothing to test: {compiler.removesuffix(' missing')} is not installed")
        return None
    if target.type == "cuda":
        torch.cuda.set_device(target)
    is_hopper = call.capability is not None and call.capability[0] == 9
    grid = tests.grid_of(family, target.type == "cpu", is_hopper)
    if not grid:
        console.print(f"nothing to test: {family} has no kernels for {name}")
        return None
    checks = [check for check in grid if only is None or only in str(check)]
    if not checks:
        raise typer.BadParameter(f"{only!r} matches no check.", param_hint="--only")
    jobs = jobs or (min(8, (os.cpu_count() or 1) // 2) if target.type == "cuda" else 1)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(family, total=len(checks))
        outcomes = tests.run(family, target, checks, lambda outcome: progress.advance(task), jobs=jobs)
    bad = [outcome for outcome in outcomes if not outcome.passed]
    console.print(_outcomes(outcomes))
    console.print(f"{family}: {len(outcomes) - len(bad)} of {len(outcomes)} checks passed")
    complete = only is None
    content = {
        "family": family,
        "device": call.device_name,
        "target": name,
        "source_hash": qualification.source_hash(family),
        "compiler": compiler,
        "torch": torch.__version__,
        "date": now(),
        "complete": complete,
        "cases": len(outcomes),
        "failed": len(bad),
        "rows": [
            {
                "check": str(outcome.check),
                "passed": outcome.passed,
                "errors": [[what, _finite(error), limit] for what, error, limit in outcome.errors],
                "seconds": round(outcome.seconds, 3),
                "note": outcome.note,
            }
            for outcome in outcomes
        ],
    }
    contents.append(content)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        store.write_json(output, content)
        console.print(f"written to {output}", soft_wrap=True)
    if not complete or call.capability is None:
        console.print("no verdict is kept of a partial or interpreted run")
        return bool(bad)
    try:
        path = qualification.keep(
            family, call.capability, call.is_rocm, call.device_name, cases=len(outcomes), failed=len(bad), date=now()
        )
        console.print(f"verdict kept in {path}", soft_wrap=True)
    except OSError as problem:
        console.print(f"the verdict could not be kept: {problem}", soft_wrap=True)
    return bool(bad)


def _finite(error: float) -> float | str:
    """JSON has no infinity."""
    import math

    return error if math.isfinite(error) else "not finite"


def _outcomes(outcomes: list[Any]) -> Any:
    from rich.table import Table

    view = Table("check", "", "nearest its limit", "error", "limit", "s", "note")
    for outcome in outcomes:
        what, error, limit = outcome.worst or ("-", 0.0, 0.0)
        verdict = "[green]passed" if outcome.passed else "[red]FAILED"
        view.add_row(
            str(outcome.check), verdict, what, f"{error:.2e}", f"{limit:.2e}", f"{outcome.seconds:.1f}", outcome.note
        )
    return view


# --- demo -------------------------------------------------------------------------------------------------------------


@app.command(epilog=_examples("ffpa-hf demo", "ffpa-hf demo --output report --steps 20"))
def demo(
    output: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-report"),
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU where there is one.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
) -> None:
    """A photograph through an autoencoder and a small fine-tuning, with and without our attention, as one HTML page."""
    try:
        from ffpa_hf.demo import run
    except ImportError as problem:
        print(f"The demo needs more packages: pip install 'ffpa-hf[demo]' ({problem})", file=sys.stderr)
        raise typer.Exit(2) from None
    raise typer.Exit(run(output=output, device=device, steps=steps))
