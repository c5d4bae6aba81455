"""Results as Markdown: the tables of README, made of nothing but results files.

Each case and direction is taken whole from one run, the newest that timed it with SDPA, so that every ratio is within
a run. What no file has is left out. Knows nothing of how a number was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ffpa_hf.bench import cases
from ffpa_hf.bench.results import Results, Row

#: What a case stands for, where its shape does not say it.
USES = {
    "d512_gqa_causal_8k": "Gemma 4 31B, global layer",
    "d512_1h_16k": "image VAE",
    "d512_decode_8k": "decoding, in a CUDA graph",
    "d256_window1k_8k": "Gemma 4, local layer",
    "d128_flux": "FLUX.1, 1024 px",
    "d64_cogvideox": "CogVideoX",
}
#: Providers as a reader knows them; others stand under their own names.
TITLES = {
    "sdpa": "PyTorch SDPA",
    "ffpa-attn/triton": "ffpa-attn, Triton",
    "ffpa-attn/cute": "ffpa-attn, CuTe-DSL",
    "fa4": "FlashAttention-4",
    "fa3": "FlashAttention-3",
    "fa3-fp8": "FlashAttention-3, FP8",
    "ffpa_hf/auto": "ffpa_hf",
    "ffpa_hf/triton": "ffpa_hf, Triton",
    "ffpa_hf/cuda": "ffpa_hf, CUDA C++",
    "ffpa_hf/cuda-fp8": "ffpa_hf, CUDA C++, FP8",
    "ffpa_hf/cute": "ffpa_hf, CuTe-DSL",
}
_KERNEL_DIRECTIONS = ("fwd", "bwd", "fwd+bwd")

#: (case, direction) -> provider -> row
Blocks = dict[tuple[str, str], dict[str, Row]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def newest(runs: Iterable[Results], device: str | None = None) -> tuple[Blocks, list[Results]]:
    """The timed rows of each case and direction from the newest run that timed SDPA there, and the runs so used.

    device: that device's runs only; default: the newest run's.
    """
    ordered = sorted(runs, key=lambda run: run.date, reverse=True)
    if device is None and ordered:
        device = ordered[0].device
    blocks: Blocks = {}
    used: list[Results] = []
    for run in ordered:
        if run.device != device:
            continue
        own: Blocks = {}
        for row in run.rows:
            if row.ms is not None:
                own.setdefault((row.case, row.direction), {})[row.provider] = row
        fresh = {key: rows for key, rows in own.items() if "sdpa" in rows and key not in blocks}
        if fresh:
            blocks |= fresh
            used.append(run)
    return blocks, used


def kernels(runs: Iterable[Results]) -> tuple[str, list[Results]]:
    """A table with a line for each published case and a column for each provider, and the runs that it shows.

    Cells are TFLOP/s; milliseconds where a mask leaves most of the square out, which SDPA computes all the same; and
    microseconds where a call is captured in a graph. The table is "" where no run has a published case.
    """
    known = {case.id: case for case in cases.KERNEL}
    runs = [run for run in runs if any(row.case in known and row.direction in _KERNEL_DIRECTIONS for row in run.rows)]
    blocks, used = newest(runs)
    by_case: dict[str, Blocks] = {}
    for key, rows in blocks.items():
        if key[0] in known and key[1] in _KERNEL_DIRECTIONS:
            by_case.setdefault(key[0], {})[key] = rows
    if not by_case:
        return "", []
    names = _providers(blocks.values())
    lines = []
    for case in cases.KERNEL:
        found = by_case.get(case.id)
        if found:
            directions = [way for way in _KERNEL_DIRECTIONS if (case.id, way) in found]
            cells = [_joined([_kernel_cell(case, found[case.id, way], name) for way in directions]) for name in names]
            ratios = _joined([_best_ratio(found[case.id, way]) for way in directions])
            lines.append([_case_title(case), *cells, ratios])
    return table(["case", *(TITLES.get(name, name) for name in names), "ours against SDPA"], lines), used


def models(runs: Iterable[Results]) -> tuple[str, list[Results]]:
    """A table with a line for each whole model's job, in milliseconds, and the runs that it shows; "" without one."""
    from ffpa_hf.bench import end_to_end
    from ffpa_hf.bench.models import MODELS

    known = {case.id: case for case in end_to_end.FULL}
    blocks, used = newest(run for run in runs if any(row.case in known for row in run.rows))
    blocks = {key: rows for key, rows in blocks.items() if key[0] in known}
    if not blocks:
        return "", []
    names = _providers(blocks.values())
    lines = []
    words = {"prefill": ", to the first token", "decode": ", each token after it"}
    for case in end_to_end.FULL:
        for (name, direction), rows in blocks.items():
            if name == case.id:
                title = f"{MODELS[case.model].text}: {case.text}{words.get(direction, '')}"
                cells = [_ms(rows.get(provider), rows) for provider in names]
                lines.append([title, *cells, _best_ratio(rows)])
    return table(["whole model", *(TITLES.get(name, name) for name in names), "ours against SDPA"], lines), used


def provider_order(name: str) -> tuple[int, str]:
    """Sorts providers: those with a title in the titles' order, then the others by name."""
    order = list(TITLES)
    return (order.index(name) if name in order else len(order)), name


def _providers(blocks: Iterable[dict[str, Row]]) -> list[str]:
    """Every provider that was timed, sorted."""
    return sorted({name for rows in blocks for name in rows}, key=provider_order)


def _case_title(case: cases.Case) -> str:
    heads = f"{case.heads}" if case.group == 1 else f"{case.heads}:{case.kv_heads}"
    heads = "one head" if case.heads == 1 else f"{heads} heads"
    batch = "" if case.batch == 1 else f"B={case.batch}, "
    length = _length(case.q_len) if case.q_len == case.kv_len else f"{_length(case.q_len)} x {_length(case.kv_len)}"
    mask = {"none": "", "window": f", window {case.window}"}.get(case.mask, f", {case.mask}")
    use = f" ({USES[case.id]})" if case.id in USES else ""
    return f"D={case.head_dim}, {batch}{heads}, {length}{mask}{use}"


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def _kernel_cell(case: cases.Case, rows: dict[str, Row], provider: str) -> str:
    row = rows.get(provider)
    if row is None or row.ms is None:
        return "-"
    if case.graph:
        text = f"{1e3 * row.ms:.0f} us"
    elif case.mask == "window" or not row.tflops:
        text = f"{row.ms:.3g} ms"
    else:
        text = f"{row.tflops:.0f}"
    return f"**{text}**" if row.ms == _fastest(rows) else text


def _ms(row: Row | None, rows: dict[str, Row]) -> str:
    if row is None or row.ms is None:
        return "-"
    text = f"{row.ms:.0f} ms" if row.ms >= 100 else f"{row.ms:.3g} ms"
    return f"**{text}**" if row.ms == _fastest(rows) else text


def _fastest(rows: dict[str, Row]) -> float:
    return min(row.ms for row in rows.values() if row.ms is not None)


def _best_ratio(rows: dict[str, Row]) -> str:
    ours = [row.speedup_vs_sdpa for row in rows.values() if row.provider.startswith("ffpa_hf/")]
    known = [ratio for ratio in ours if ratio is not None]
    return "-" if not known else f"{max(known):.1f}x" if max(known) >= 2 else f"{max(known):.2f}x"


def _joined(cells: Sequence[str]) -> str:
    """Directions side by side; one dash where there is none at all."""
    return cells[0] if set(cells) == {"-"} else " / ".join(cells)
