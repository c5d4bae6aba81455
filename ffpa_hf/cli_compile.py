"""`ffpa-hf compile`: fills the cache of compiled CUDA C++ kernels for GPUs that need not be here.

Parses, compiles in worker processes, prints. Heavy imports stay inside.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ffpa_hf.kernels.cuda.program import Variant

_ARCHS = {"sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9), "sm_90a": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}
_PRECISIONS = ("bf16", "fp16")


def compile_kernels(
    arch: Annotated[str, typer.Option(help=f"Targets by commas: {', '.join(_ARCHS)}.")],
    backend: Annotated[str, typer.Option(help="cuda: Triton's kernels are compiled at their first call.")] = "cuda",
    head_dims: Annotated[str, typer.Option(help="Multiples of 8 from 64 to 1024, by commas.")] = "64,128,256,512",
    precision: Annotated[str, typer.Option(help="bf16, fp16 by commas.")] = "bf16",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: the cores but one.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on standard output, all else on the error stream.")
    ] = False,
) -> None:
    """Compile CUDA C++ kernels ahead into this user's cache, without a GPU: plain, causal, and each kind of mask.

    What the cache has is not compiled again, so an interrupted run goes on where it stopped. Exits 1 where a kernel
    does not compile, 2 where there is no compiler.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ffpa_hf import cli
    from ffpa_hf.kernels import compile_cache, cuda

    if backend != "cuda":
        raise typer.BadParameter(f"{backend!r}: only cuda is compiled ahead.", param_hint="--backend")
    targets = _chosen(arch, _ARCHS, "--arch")
    halves = _chosen(precision, _PRECISIONS, "--precision")
    widths = _widths(head_dims)
    errors = Console(stderr=True)
    problem = cuda._try_import()
    if problem is not None:
        errors.print(f"no compiler: {problem}; pip install 'ffpa-hf[cuda]' brings it", markup=False)
        raise typer.Exit(2)
    wanted = variants(targets, widths, halves)
    failed: dict[str, str] = {}
    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    count = min(len(wanted), jobs or max(1, (os.cpu_count() or 2) - 1))
    with Progress(*columns, console=errors) as progress, ProcessPoolExecutor(count, get_context("spawn")) as pool:
        bar = progress.add_task("", total=len(wanted))
        running = {pool.submit(_compile, variant): variant for variant in wanted}
        for done in as_completed(running):
            try:
                done.result()
            except Exception as error:  # one kernel, or a worker that was killed
                failed[str(running[done])] = str(error)
            progress.update(bar, advance=1, description=str(running[done]))
    folder = str(compile_cache.directory())
    if as_json:
        cli._print_json({"kernels": len(wanted), "failed": failed, "directory": folder})
    else:
        print(f"{len(wanted) - len(failed)} of {len(wanted)} kernels are in {folder}")
    for name, text in failed.items():
        errors.print(f"{name}: {text}", markup=False)
    if failed:
        raise typer.Exit(1)


def variants(archs: list[str], head_dims: list[int], precisions: list[str]) -> list[Variant]:
    """The kernels that calls of these kinds ask for: on sm_90a those of Hopper too, where there are some."""
    import torch

    from ffpa_hf.kernels.cuda import configs, launch

    found = []
    for arch in archs:
        for head_dim in head_dims:
            for precision in precisions:
                dtype = torch.bfloat16 if precision == "bf16" else torch.float16
                kinds: list[dict[str, Any]] = [
                    {}, {"causal": True}, {"mask": True}, {"bias": dtype}, {"intervals": True},
                    {"intervals": True, "key_mask": True},
                ]  # fmt: skip
                found += [launch.native_variant(head_dim, dtype, _ARCHS[arch], **kind) for kind in kinds]
                if arch == "sm_90a" and head_dim <= configs.WIDEST_TWIN:
                    found += [launch.hopper_variant(head_dim, dtype, **kind) for kind in kinds]
    return list(dict.fromkeys(found))


def _compile(variant: Variant) -> None:
    from ffpa_hf.kernels.cuda import program

    program.compile_variant(variant)


def _chosen(text: str, known: Any, option: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        if word not in known:
            raise typer.BadParameter(f"{word!r}; use {', '.join(known)}.", param_hint=option)
    if not words:
        raise typer.BadParameter(f"nothing is named; use {', '.join(known)}.", param_hint=option)
    return words


def _widths(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 64 <= int(word) <= 1024 and int(word) % 8 == 0 for word in words):
        raise typer.BadParameter(f"{text!r}: use multiples of 8 from 64 to 1024, by commas.", param_hint="--head-dims")
    return list(dict.fromkeys(int(word) for word in words))
