"""The demo: the two jobs people come with, run with and without ffpa_hf, compared and shown.

Only uses what any user could import; imports diffusers, transformers, accelerate and matplotlib when run, not before.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ffpa_hf.demo.evidence import Check, Site

#: import name -> distribution that brings it
_NEEDS = {
    "diffusers": "diffusers",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
    "PIL": "pillow",
}


def run(
    output: Path | str = "demo-report",
    device: str | None = None,
    steps: int | None = None,
    *,
    seed: int = 0,
    console: Console | None = None,
    photo_options: dict[str, Any] | None = None,
    finetune_options: dict[str, Any] | None = None,
) -> int:
    """Run the demo and write output/index.html, photo.png and losses.png.

    device: "cpu" or "cuda"; None takes the GPU where there is one. steps: training steps, None is 40 on a CPU and 100
    on a GPU. photo_options and finetune_options go to `photo.run_photo` and `finetune.run_finetune` (smaller sizes,
    for tests). Returns a process exit code: 0 when every check passed, 1 when one failed, 2 when a package is missing
    or the device is not there.
    """
    import torch
    from rich.console import Console

    console = console or Console()
    missing = [distribution for module, distribution in _NEEDS.items() if not _importable(module)]
    if missing:
        console.print(f"The demo needs {', '.join(missing)}: pip install 'ffpa-hf\\[demo]'")
        return 2
    available = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
    try:
        chosen = torch.device(device or ("cuda" if "cuda" in available else "cpu"))
    except RuntimeError:  # no such kind of device
        chosen = torch.device("meta")
    if chosen.type not in available:
        console.print(
            f"The demo runs on cpu, and on cuda where a GPU is found; device={device!r} is not to be had here."
        )
        return 2
    if steps is not None and steps < 1:
        console.print(f"steps={steps} is not a number of training steps: give 1 or more.")
        return 2

    from ffpa_hf.demo import page
    from ffpa_hf.demo.finetune import IMPLEMENTATIONS, ON_CPU, ON_GPU, run_finetune
    from ffpa_hf.demo.interpreted import run_interpreted
    from ffpa_hf.demo.photo import run_photo

    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else f"CPU ({platform.machine()})"
    console.print(f"[bold]ffpa_hf demo[/bold] on {name}, {torch.get_num_threads()} CPU threads")

    with _progress(console) as progress:
        task = progress.add_task("photograph", total=6)
        photo = run_photo(chosen, seed=seed, advance=_advance(progress, task, done=False), **(photo_options or {}))
        progress.update(task, completed=6, description="photograph")
        recipe = (finetune_options or {}).get("recipe") or (ON_CPU if chosen.type == "cpu" else ON_GPU)
        task = progress.add_task("fine-tuning", total=len(IMPLEMENTATIONS) * (steps or recipe.steps) + 3)
        advance = _advance(progress, task, done=True)
        finetune = run_finetune(chosen, steps=steps, seed=seed, advance=advance, **(finetune_options or {}))
        progress.update(task, description="fine-tuning")

    checks = [*photo.checks, *finetune.checks]
    sites = [*photo.sites, *finetune.sites]
    notes = _notes(chosen.type, sites)
    if chosen.type == "cpu" and platform.system() == "Linux":
        with console.status("one call through the Triton kernels, in Triton's interpreter"):
            kernel_checks, note = run_interpreted()
        checks += kernel_checks
        notes += [note] if note else []
    page.draw_photo(photo, folder / "photo.png")
    page.draw_losses(finetune, folder / "losses.png")
    page.write_page(
        folder / "index.html",
        device=name,
        versions=_versions(),
        notes=notes,
        photo=photo,
        finetune=finetune,
        checks=checks,
        sites=sites,
        seconds=time.perf_counter() - started,
    )
    _print(console, checks, sites, notes)
    console.print(f"Report: {folder / 'index.html'}", soft_wrap=True)
    return 0 if all(check.passed for check in checks) else 1


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # a broken package is as good as a missing one
        return False
    return True


def _versions() -> dict[str, str]:
    names = ("ffpa-hf", "torch", "triton", "diffusers", "transformers", "accelerate")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _notes(device: str, sites: list[Site]) -> list[str]:
    served = sorted({site.backend for site in sites})
    if device == "cpu":
        return [
            "No kernel of ours runs fast on a CPU: here ffpa_hf hands every call to PyTorch's SDPA, as the table of "
            "call sites says. A CPU run shows that switching it on changes nothing; speed needs a GPU."
        ]
    return [f"Served by: {', '.join(served)}."]


def _progress(console: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


def _advance(progress: Any, task: Any, *, done: bool) -> Any:
    """A callback for the parts: tells what runs now; done=False where it is called before each step, not after."""
    calls = 0

    def advance(what: str) -> None:
        nonlocal calls
        progress.update(task, description=what, completed=calls + (1 if done else 0))
        calls += 1

    return advance


def _print(console: Console, checks: list[Check], sites: list[Site], notes: list[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Every attention call site", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("module, shapes", overflow="fold")
    table.add_column("fwd/bwd (why)", no_wrap=True)
    for column in ("calls", "ms", "ffpa ms"):
        table.add_column(column, justify="right", no_wrap=True)
    reasons = list(dict.fromkeys(site.reason for site in sites))
    for site in sites:
        what = f"{escape(site.module)}\n[dim]{site.part} {escape(site.shape)}[/dim]"
        served = f"{site.backend}/{site.backward} ({reasons.index(site.reason) + 1})"
        table.add_row(what, served, str(site.calls), f"{site.default_ms:.2f}", f"{site.ffpa_ms:.2f}")
    console.print(table)
    for number, reason in enumerate(reasons, 1):
        console.print(f"  ({number}) {escape(reason)}", highlight=False)
    console.print("  ms: one forward of the module, median, without ffpa_hf and with it", highlight=False)
    console.print()
    for check in checks:
        mark = "[green]ok    [/green]" if check.passed else "[red]FAILED[/red]"
        text = escape(f"{check.name}: {check.measured} (limit {check.allowed})")
        console.print(f"{mark} {text}", highlight=False, soft_wrap=True)
    for note in notes:
        console.print(f"[dim]{escape(note)}[/dim]", highlight=False)
