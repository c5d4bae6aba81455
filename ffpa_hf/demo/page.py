"""Pictures and page of the demo: two PNG files and an index.html that shows them.

Draws what it is given; measures and decides nothing.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ffpa_hf.demo.evidence import Check, Site
from ffpa_hf.demo.finetune import FinetuneResult
from ffpa_hf.demo.photo import PhotoResult

_INK, _MUTED, _LINE = "#1f2933", "#66727f", "#d5dae0"
_SDPA, _EAGER, _FFPA = "#8fb3d9", "#b8a27a", "#c2410c"


def draw_photo(result: PhotoResult, path: Path) -> None:
    """photograph | default processor | FFPAAttnProcessor | difference, side by side, as a PNG."""
    from matplotlib.figure import Figure

    difference = np.abs(result.ffpa - result.default).max(axis=2)
    largest = float(difference.max())
    low, high = (np.quantile(result.default, q, axis=(0, 1), keepdims=True) for q in (0.01, 0.99))
    spread = np.maximum(high - low, 1e-12)
    panels = (
        ("the photograph", (result.photograph + 1) / 2),
        ("decoded, diffusers' processor", (result.default - low) / spread),
        ("decoded, FFPAAttnProcessor", (result.ffpa - low) / spread),
    )
    figure = Figure(figsize=(13.6, 4.1), layout="constrained")
    axes = figure.subplots(1, 4)
    for axis, (title, image) in zip(axes, panels, strict=False):
        axis.imshow(np.clip(image, 0, 1))
        axis.set_title(title, fontsize=11, color=_INK)
    drawn = axes[3].imshow(difference, cmap="magma", vmin=0, vmax=largest or 1.0)
    title = f"difference, at most {largest:.1e}" if largest else "difference: none, bit for bit"
    axes[3].set_title(title, fontsize=11, color=_INK)
    if largest:
        figure.colorbar(drawn, ax=axes[3], shrink=0.8)
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_color(_LINE)
    figure.savefig(path, dpi=110, facecolor="white")


def draw_losses(result: FinetuneResult, path: Path) -> None:
    """Loss curves above, distance from the "sdpa" curve and its limit below, as a PNG."""
    from matplotlib.figure import Figure

    sdpa, eager, ffpa = (result.runs[name].losses for name in ("sdpa", "eager", "ffpa"))
    steps = np.arange(1, len(sdpa) + 1)
    figure = Figure(figsize=(9.6, 6.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    top.plot(steps, sdpa, color=_SDPA, linewidth=6, solid_capstyle="round", label='attn_implementation="sdpa"')
    top.plot(steps, ffpa, color=_FFPA, linewidth=1.6, label='attn_implementation="ffpa"')
    top.set_ylabel("loss, nats per byte")
    top.set_ylim(bottom=0)
    bottom.plot(steps, result.limits, color=_INK, linewidth=1, linestyle="--", label="allowed for ffpa")
    floor = 10.0 ** np.floor(np.log10(min(result.limits)) - 3)
    for losses, color, name in ((eager, _EAGER, "eager"), (ffpa, _FFPA, "ffpa")):
        gaps = np.maximum(np.abs(np.subtract(losses, sdpa)), floor)
        bottom.plot(steps, gaps, color=color, linewidth=1.6, marker="o", markersize=3, label=name)
    bottom.set_yscale("log")
    bottom.set_ylabel(f"distance from the sdpa loss\n(below {floor:.0e} drawn there)")
    bottom.set_xlabel("training step")
    for axis in (top, bottom):
        axis.grid(True, color=_LINE, linewidth=0.6)
        axis.legend(frameon=False, fontsize=9, loc="best")
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(_LINE)
        axis.tick_params(colors=_MUTED)
    figure.savefig(path, dpi=110, facecolor="white")


_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #5b6774; --line: #d9dee4; --paper: #fff; --panel: #f5f7f9;
        --good: #157347; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --muted: #9aa6b2; --line: #36414c; --paper: #14191e;
        --panel: #1c2329; --good: #4ade80; --bad: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 2.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .5rem; }
p { margin: .4rem 0 .8rem; max-width: 78ch; } .muted { color: var(--muted); }
.verdict { margin: 1.2rem 0; padding: .8rem 1rem; border-left: 5px solid var(--good); background: var(--panel); }
.verdict.bad { border-color: var(--bad); } .verdict strong { color: var(--good); } .bad strong { color: var(--bad); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .86rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .7rem .4rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 600; white-space: nowrap; } td.number, th.number { text-align: right; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .92em; }
.yes { color: var(--good); font-weight: 700; } .no { color: var(--bad); font-weight: 700; }
img { max-width: 100%; height: auto; display: block; background: #fff; border-radius: 4px; }
"""


def write_page(
    path: Path,
    *,
    device: str,
    versions: dict[str, str],
    notes: Sequence[str],
    photo: PhotoResult,
    finetune: FinetuneResult,
    checks: Sequence[Check],
    sites: Sequence[Site],
    seconds: float,
) -> None:
    """Write the report beside photo.png and losses.png."""
    failed = [check for check in checks if not check.passed]
    verdict = (
        f"<strong>{len(failed)} of {len(checks)} checks failed.</strong> " + _text("; ".join(c.name for c in failed))
        if failed
        else f"<strong>All {len(checks)} checks passed.</strong> With and without ffpa_hf the numbers agree."
    )
    recipe, runs = finetune.recipe, finetune.runs
    body = f"""
<h1>ffpa_hf demo report</h1>
<p class="muted">{_text(device)}, {_text(", ".join(f"{name} {version}" for name, version in versions.items()))};
made in {seconds:.0f} s.</p>
<div class="verdict{" bad" if failed else ""}">{verdict}</div>
{"".join(f"<p>{_text(note)}</p>" for note in notes)}

<h2>What was checked</h2>
<div class="scroll"><table>
<tr><th></th><th>check</th><th class="number">measured</th><th class="number">limit</th><th>why this limit</th></tr>
{"".join(_check_row(check) for check in checks)}
</table></div>

<h2>A photograph through the autoencoder</h2>
<p>{photo.size} x {photo.size} pixels through AutoencoderKL at full size ({photo.parameters / 1e6:.1f} M parameters, one
512-wide attention head in the encoder and one in the decoder) in {_dtype(photo.dtype)}. Its weights are random, since
the demo downloads nothing: the decoded picture has to be the <em>same</em> picture, not a pretty one (each is stretched
to full contrast). Encode and decode took {photo.default_seconds:.2f} s with diffusers' own processor and
{photo.ffpa_seconds:.2f} s with <code>FFPAAttnProcessor</code>.</p>
<img src="photo.png" alt="The photograph, the picture decoded with either processor, and their difference">

<h2>Fine-tuning with Accelerate</h2>
<p>A model of Gemma 4's architecture ({finetune.parameters / 1e6:.1f} M parameters, {recipe.layers} layers, head dims
{recipe.sliding_head_dim} in a window of {recipe.window} and {recipe.global_head_dim} global, {recipe.heads} query heads
over {recipe.key_value_heads} key/value heads) on the bytes of <em>Alice's Adventures in Wonderland</em>
({finetune.text_bytes // 1000} kB, public domain), batches of {recipe.batch} x {recipe.sequence} bytes in
{_dtype(finetune.dtype)}, from the same random weights. A step took
{", ".join(f"{run.seconds_per_step:.2f} s with {name}" for name, run in runs.items())}.</p>
<img src="losses.png" alt="Loss curves with sdpa and ffpa, and their distance">

<h2>Every attention call site</h2>
<p>From <code>ffpa_hf.report(model)</code>. The times are for one forward of the whole attention module, its projections
included: median without ffpa_hf, then with it.</p>
<div class="scroll"><table>
<tr><th>part</th><th>module</th><th>shapes</th><th>served by</th><th>backward</th><th>why</th>
<th class="number">calls</th><th class="number">default ms</th><th class="number">ffpa ms</th></tr>
{"".join(_site_row(site) for site in sites)}
</table></div>
"""
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>ffpa_hf demo report</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>{body}</body></html>\n'
    )
    path.write_text(page, encoding="utf-8")


def _check_row(check: Check) -> str:
    mark = '<span class="yes">ok</span>' if check.passed else '<span class="no">FAILED</span>'
    return (
        f'<tr><td>{mark}</td><td>{_text(check.name)}</td><td class="number">{_text(check.measured)}</td>'
        f'<td class="number">{_text(check.allowed)}</td><td class="muted">{_text(check.why)}</td></tr>'
    )


def _site_row(site: Site) -> str:
    return (
        f"<tr><td>{_text(site.part)}</td><td><code>{_text(site.module)}</code></td><td><code>{_text(site.shape)}</code>"
        f"</td><td>{_text(site.backend)}</td><td>{_text(site.backward)}</td><td>{_text(site.reason)}</td>"
        f'<td class="number">{site.calls}</td><td class="number">{site.default_ms:.2f}</td>'
        f'<td class="number">{site.ffpa_ms:.2f}</td></tr>'
    )


def _text(value: str) -> str:
    return html.escape(value)


def _dtype(dtype: object) -> str:
    return {"torch.float32": "fp32", "torch.bfloat16": "bf16"}.get(str(dtype), str(dtype))
