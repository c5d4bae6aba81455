"""Fill the made parts of README.md and docs/*.md: tables that come from the code and from benchmarks/results/.

    python scripts/make_docs.py            # rewrite what has changed
    python scripts/make_docs.py --check    # change nothing; exit code 1 and the pages' names where something has

A made part stands between `<!-- made: NAME -->` and `<!-- /made -->`. The tables ask the same rules as the planner, for
an sm_90 GPU, so they come out the same on any machine.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ffpa_hf import backends, settings
from ffpa_hf.bench import plots, results, summary
from ffpa_hf.bench.summary import table
from ffpa_hf.call import AttentionCall
from ffpa_hf.kernels import cuda, cute, qualification, sdpa, triton
from ffpa_hf.kernels.common import Accepted
from ffpa_hf.kernels.cuda import fp8

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PART = re.compile(r"^(<!-- made: (\S+) -->\n).*?^(<!-- /made -->)$", re.DOTALL | re.MULTILINE)

#: (column, module, config, backward) of the table of features.
COLUMNS: tuple[tuple[str, Any, Any, bool], ...] = (
    ("SDPA", sdpa, backends.SDPABackend(), False),
    ("Triton", triton, backends.TritonBackend(), False),
    ("Triton, backward", triton, backends.TritonBackend(), True),
    ('CUDA, `family="native"`', cuda, backends.CUDABackend(family="native"), False),
    ('CUDA, `family="tma"`', cuda, backends.CUDABackend(family="tma"), False),
    ("CUDA, `enable_fp8=True`", fp8, backends.CUDABackend(enable_fp8=True), False),
    ("CUDA, `enable_fp4=True`", cuda, backends.CUDABackend(enable_fp4=True), False),
    ("CuTe-DSL", cute, backends.CuTeDSLBackend(), False),
)
#: A call that every kernel is made for; each feature changes a little of it.
CALL = AttentionCall(1, 32, 32, 8192, 8192, 512, 512, torch.bfloat16, capability=(9, 0), device_name="sm_90")
_ADDITIVE = {"mask_kind": "additive", "has_bias": True, "bias_dtype": torch.bfloat16}
FEATURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bfloat16", {}),
    ("float16", {"dtype": torch.float16}),
    ("float32", {"dtype": torch.float32}),
    ("`is_causal`", {"is_causal": True}),
    ("grouped or shared key heads (GQA, MQA)", {"kv_heads": 4}),
    ("1 to 7 queries over a long cache (decode)", {"q_len": 1}),
    ("bool mask", {"mask_kind": "bool"}),
    ("additive mask", _ADDITIVE),
    ("additive mask that needs a gradient", {**_ADDITIVE, "bias_needs_grad": True, "needs_grad": True}),
    ("`RowIntervals`", {"mask_kind": "intervals"}),
    ("packed sequences (`ffpa_attn_varlen_func`)", {"mask_kind": "intervals", "varlen": True}),
    ("dropout", {"dropout_p": 0.1}),
    ("log-sum-exp (`return_lse`)", {"return_lse": True}),
    ("`softcap`", {"softcap": 30.0}),
    ("`sinks`", {"has_sinks": True}),
    ("value of another width than query", {"value_dim": 256}),
)


def capabilities() -> str:
    """What each backend answers to a call with one feature."""
    rows = []
    for feature, changes in FEATURES:
        call = dataclasses.replace(CALL, **changes)
        rows.append([feature, *(_verdict(call, *column[1:]) for column in COLUMNS)])
    rows.append(["head dims", *(_head_dims(*column[1:]) for column in COLUMNS)])
    return table(["", *(name for name, *_ in COLUMNS)], rows)


def _verdict(call: AttentionCall, module: Any, config: Any, backward: bool) -> str:
    answer = module.supports(call, config, backward=backward)
    if call.needs_grad and getattr(config, "quantised", False) and isinstance(answer, Accepted):
        return "raises"  # unless a backward backend is named
    if module is sdpa:
        return "yes" if call.sdpa_composite() is None else "plain torch"
    if isinstance(answer, Accepted) or answer.rule == "package":  # a compiler that is missing here says nothing of it
        return "yes"
    if answer.rule == "not built":
        return "not built"
    return {"fallback": "SDPA instead", "error": "raises"}.get(answer.kind, answer.reason)


def _head_dims(module: Any, config: Any, backward: bool) -> str:
    if module is sdpa:
        return "any"
    calls = [dataclasses.replace(CALL, head_dim=width, value_dim=width) for width in range(4, 1100, 4)]
    verdicts = [(call.head_dim, _verdict(call, module, config, backward)) for call in calls]
    served = [head_dim for head_dim, verdict in verdicts if verdict == "yes"]
    if not served:
        return "not built"
    if len(served) < 8:
        return ", ".join(map(str, served))
    steps = {after - before for before, after in zip(served, served[1:], strict=False)}
    return (
        f"{served[0]} to {served[-1]}, multiples of {steps.pop()}" if len(steps) == 1 else ", ".join(map(str, served))
    )


def qualified() -> str:
    """Kernel families against targets, as the shipped verdicts have them."""
    words = {"run": "ran", "kin": "kin", "unrun": "off"}
    targets = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    rows = []
    for family in qualification.FAMILIES:
        shipped = [qualification._shipped_verdict(family, qualification.target_name(target)) for target in targets]
        rocm = "-" if family.startswith("cuda") else words[qualification._shipped_verdict(family, "rocm").level]
        rows.append([f"`{family}`", *(words[verdict.level] for verdict in shipped), rocm])
    return table(["kernels", *map(qualification.target_name, targets), "ROCm"], rows)


def options(config: type) -> Callable[[], str]:
    """The fields of a backend's config, with their defaults and what its docstring says of them."""

    def made() -> str:
        said: dict[str, str] = {}
        names: list[str] = []
        for line in inspect.cleandoc(config.__doc__ or "").splitlines()[1:]:
            begins = re.match(r"(\w+(?:, \w+)*): (.*)", line)
            if begins:
                names = begins[1].split(", ")
                said.update(dict.fromkeys(names, begins[2]))
            elif line.strip() and names and line.startswith(" "):
                said.update({name: f"{said[name]} {line.strip()}" for name in names})
            elif not line.strip():
                names = []
        rows = [(f"`{each.name}`", f"`{each.default!r}`", said[each.name]) for each in dataclasses.fields(config)]
        return table(["option", "default", "effect"], rows)

    return made


def environment() -> str:
    """Every variable that is read, with the value that holds without it."""
    defaults = settings.Settings()
    rows = []
    for variable, field, meaning in settings.VARIABLES:
        value = getattr(defaults, field)
        default = "" if value is None else f"`{int(value)}`" if isinstance(value, bool) else f"`{value}`"
        rows.append((f"`{variable}`", default, meaning))
    return table(["variable", "default", "effect"], rows)


# --- what was measured ------------------------------------------------------------------------------------------------


def bench_results() -> list[tuple[Path, dict[str, Any]]]:
    """The results files of `ffpa-hf bench`, newest first."""
    found = []
    for path in RESULTS.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content.get("rows")
        if isinstance(rows, list) and rows and isinstance(rows[0], dict) and "provider" in rows[0]:
            found.append((path, content))
    return sorted(found, key=lambda each: each[1]["date"], reverse=True)


def plots_of(path: Path) -> list[Path]:
    """The plots that were drawn of a results file, in a fixed order."""
    drawn = [ROOT / "docs" / "plots" / f"{path.stem}-{kind.name}.svg" for kind in plots.KINDS]
    return [each for each in drawn if each.exists()]


def performance() -> str:
    """One section for each results file: where and how it was made, then time and speed of every row."""
    parts = []
    for path, content in bench_results():
        versions = content["versions"]
        shown = ("python", "torch", "triton", "cuda", "cudnn", "transformers", "diffusers", "ffpa-attn")
        used = ", ".join(f"{name} {versions[name]}" for name in shown if versions.get(name))
        ceiling = content.get("matmul_tflops")
        lines = [
            f"### {path.stem}",
            f"{content['device']}, {content['date'][:10]}; {used}."
            + (f" A plain bf16 matrix product in the same run: {ceiling:.0f} TFLOP/s." if ceiling else ""),
            "\n".join(["```console", *(f"$ {line}" for line in content["command"].splitlines()), "```"]),
            *(f"![{each.stem}](plots/{each.name})" for each in plots_of(path)),
            _measured_rows(content["rows"]),
        ]
        parts.append("\n\n".join(lines))
    return "\n\n".join(parts) if parts else "No run is recorded."


def _measured_rows(rows: list[dict[str, Any]]) -> str:
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    by_case: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault((row["case"], row["direction"]), {})[row["provider"]] = row
    made = []
    for (case, direction), cells in by_case.items():
        made.append([case, direction, *(_cell(cells.get(provider)) for provider in providers)])
    return table(["case", "direction", *providers], made)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or row.get("ms") is None:
        return ""
    tflops = row.get("tflops") or 0.0
    speed = f", {tflops:.0f} TFLOP/s" if tflops >= 10 else ""  # below, bytes or the host decide
    ratio = row.get("speedup_vs_sdpa")
    times = f" ({ratio:.2f}x)" if ratio and row["provider"] != "sdpa" else ""
    ms = row["ms"]
    return f"{format(ms, '.0f' if ms >= 100 else '.3g')} ms{speed}{times}"


def measured(kind: Callable[[Sequence[results.Results]], tuple[str, list[results.Results]]]) -> Callable[[], str]:
    """README's summary of the newest runs, and the files that it comes from."""

    def made() -> str:
        files = {path.stem: results.load(path) for path, _ in bench_results()}
        text, used = kind(list(files.values()))
        links = [f"[{stem}](benchmarks/results/{stem}.json)" for stem, run in files.items() if run in used]
        ceilings = [run.matmul_tflops for run in used if run.matmul_tflops]
        reached = f" Plain bf16 matrix products reached {max(ceilings):.0f} TFLOP/s." if ceilings else ""
        return f"{text}\n\nFrom {', '.join(links)}.{reached}" if text else "No run is recorded."

    return made


PARTS: dict[str, Callable[[], str]] = {
    "capabilities": capabilities,
    "qualified": qualified,
    "triton-options": options(backends.TritonBackend),
    "cuda-options": options(backends.CUDABackend),
    "cute-options": options(backends.CuTeDSLBackend),
    "environment": environment,
    "performance": performance,
    "measured-kernels": measured(summary.kernels),
    "measured-models": measured(summary.models),
}


def filled(page: str) -> str:
    """A page's text with its made parts as they are now. Raises KeyError for a part that nothing makes."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", page)


def main(arguments: Sequence[str]) -> int:
    if set(arguments) - {"--check"}:
        print(__doc__)
        return 2
    stale = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        before = path.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            stale.append(path.name)
            if "--check" not in arguments:
                path.write_text(after, encoding="utf-8")
    if stale:
        print(("behind: " if "--check" in arguments else "rewritten: ") + ", ".join(stale))
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
