# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Choose a backend
#
# Usually none: the planner chooses. This notebook shows how to see its choice, how to measure whether it is right on
# your GPU, and how to change it. It runs on a CPU too; what needs a GPU is said, and numbers come from recorded runs.

# %%
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

import ffpa_hf
from ffpa_hf.call import AttentionCall
from ffpa_hf.dispatch import Route, plan

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"ffpa_hf {ffpa_hf.__version__}, torch {torch.__version__}, {device}")

# %% [markdown]
# ## Ask
#
# `explain` takes a call's arguments. To ask about a GPU that is not here, describe the call: `AttentionCall` is all
# that the planner knows of one, and no tensor is made.

# %%
H200 = {"capability": (9, 0), "device_name": "NVIDIA H200"}
call = AttentionCall(1, 32, 32, 8192, 8192, 512, 512, torch.bfloat16, is_causal=True, **H200)
print(plan(call))

# %% [markdown]
# The same for every head dim and length: what auto takes on an H200, per kind of mask. (The planner's answer on this
# machine: a kernel whose compiler is not installed does not count, nor does a measured table of yours.)

# %%
backends = ["sdpa", "triton", "cuda", "cute"]
colors = ["lightgray", "tab:blue", "tab:green", "tab:orange"]
head_dims = [64, 128, 192, 256, 320, 384, 512, 640, 768, 1024]
lengths = [2**power for power in range(8, 16)]
kinds = {
    "no mask": {},
    "row intervals": {"mask_kind": "intervals"},
    "softcap": {"softcap": 30.0},
}
fig, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained", sharey=True)
for ax, (title, changes) in zip(axes, kinds.items(), strict=True):
    chosen = [
        [
            backends.index(plan(AttentionCall(1, 16, 16, n, n, d, d, torch.bfloat16, **H200, **changes)).forward)
            for n in lengths
        ]
        for d in head_dims
    ]
    ax.imshow(chosen, cmap=ListedColormap(colors), vmin=0, vmax=3, aspect="auto", origin="lower")
    ax.set(title=title, xlabel="tokens", xticks=range(len(lengths)), yticks=range(len(head_dims)))
    ax.set_xticklabels([f"{n}" for n in lengths], rotation=60)
axes[0].set(ylabel="head dim", yticklabels=head_dims)
for name, color in zip(backends, colors, strict=True):
    axes[2].plot([], [], "s", color=color, label=name)
fig.legend(*axes[2].get_legend_handles_labels(), loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# ## Refusals are answers
#
# A backend asked for by name serves the call, or SDPA does with a warning, or it raises an error that names another.

# %%
wishes = {
    "Triton, 100 tokens": ({"q_len": 100, "kv_len": 100}, "triton"),
    "Triton, head dim 100": ({"head_dim": 100, "value_dim": 100}, "triton"),
    "CUDA with softcap": ({"softcap": 30.0}, "cuda"),
    "Triton in float32": ({"dtype": torch.float32}, "triton"),
    "CuTe-DSL": ({}, "cute"),
}
for title, (changes, backend) in wishes.items():
    made = plan(replace(call, **changes), Route(backend=backend, strict=True))
    print(f"{title}: {'raises, ' if made.error else 'SDPA runs, '}{made.reason}")

# %% [markdown]
# ## What was measured
#
# `ffpa-hf bench` times kernels beside SDPA and the peers that are installed, in one run, and keeps the numbers as JSON
# with the command that made them. What was last recorded of kernels:

# %%
contents = [json.loads(path.read_text()) for path in Path("../benchmarks/results").glob("*.json")]
runs = [c for c in contents if any(str(row.get("case", "")).startswith("d") for row in c.get("rows", ()))]
newest = max(runs, key=lambda c: c["date"])
runs = [c for c in runs if (c["device"], c["date"][:10]) == (newest["device"], newest["date"][:10])]
ceiling = newest["matmul_tflops"]
versions = newest["versions"]
print(f"{newest['device']}, {newest['date'][:10]}, torch {versions['torch']}, triton {versions['triton']}")
print(f"a plain matrix product in the same run: {ceiling:.0f} TFLOP/s")

rows = [row for c in runs for row in c["rows"] if row.get("tflops") and row["case"].startswith("d")]
rows = [row for row in rows if "decode" not in row["case"]]  # bytes decide there, not products
cases = sorted(dict.fromkeys(row["case"] for row in rows), key=lambda case: int(case[1:].split("_")[0]))
providers = [p for p in dict.fromkeys(row["provider"] for row in rows) if p != "sdpa"]
fig, axes = plt.subplots(2, 1, figsize=(9, 5.2), layout="constrained", sharex=True)
for ax, direction in zip(axes, ("fwd", "bwd"), strict=True):
    for index, provider in enumerate(providers):
        found = {r["case"]: r for r in rows if r["provider"] == provider and r["direction"] == direction}
        heights = [found[case]["speedup_vs_sdpa"] if case in found else math.nan for case in cases]
        width = 0.8 / len(providers)
        ax.bar([at + width * index for at in range(len(cases))], heights, width, label=provider)
    ax.axhline(1.0, color="gray", linewidth=1)
    ax.set(title={"fwd": "forward", "bwd": "backward"}[direction], ylabel="times SDPA's speed", yscale="log")
    ax.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
axes[1].set_xticks([at + 0.4 for at in range(len(cases))], cases, rotation=60)
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=4, frameon=False)
plt.show()

# %% [markdown]
# Speed against head dim, with the matrix product as the ceiling:

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
for ax, direction in zip(axes, ("fwd", "bwd"), strict=True):
    for provider in ["sdpa", *providers]:
        points = sorted(
            (int(r["case"][1:].split("_")[0]), r["tflops"])
            for r in rows
            if r["provider"] == provider and r["direction"] == direction and "_self_" in r["case"]
        )
        if points:
            ax.plot(*zip(*points, strict=True), "o-", label=provider)
    ax.axhline(ceiling, color="gray", linestyle=":", label="matrix product")
    ax.set(title={"fwd": "forward", "bwd": "backward"}[direction], xlabel="head dim (self attention, 4k or 8k tokens)")
axes[0].set(ylabel="TFLOP/s", ylim=0)
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## Measure your own
#
# The same command here. On a CPU the cases are toys, served by SDPA in both rows: what differs is the host time of a
# call, some tens of microseconds, which shapes worth a kernel do not notice.

# %%
folder = tempfile.mkdtemp()
colors_off = {name: text for name, text in os.environ.items() if "COLOR" not in name}
environment = {**colors_off, "COLUMNS": "110", "FFPA_CACHE_DIR": "tables"}  # tables of this notebook alone


def run_command(*words):
    command = [sys.executable, "-m", "ffpa_hf", *words]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(done.stdout.decode().strip().replace(folder, "."))


cases = "d512_1h_16k" if device == "cuda" else "cpu_gqa_causal"
run_command(
    *("bench", "--cases", cases, "--providers", "sdpa,ffpa_hf/auto", "--seconds", "0.2", "--directions", "fwd"),
    *("--output", "."),
)

# %% [markdown]
# ## Tune for your program
#
# `record` runs a script and writes down its attention calls; `autotune` times tiles and backends for them and keeps
# both in your user's tables, which later runs read. `--list` only says what it would measure, which needs no GPU.

# %%
(Path(folder) / "program.py").write_text(
    """
import torch
import ffpa_hf

device = "cuda" if torch.cuda.is_available() else "cpu"
for length in (512, 768, 1024):
    q, k, v = (torch.randn(1, 4, length, 320, dtype=torch.bfloat16, device=device) for _ in range(3))
    ffpa_hf.ffpa_attn_func(q, k, v, is_causal=True)
"""
)
run_command("record", "--output", "calls.json", "program.py")

# %%
run_command("autotune", "--shapes-from", "calls.json", "--list")

# %% [markdown]
# On a GPU, drop `--list`. `ffpa-hf bench --check-auto` then proves over a sweep of shapes that auto's choice is nowhere
# slower than SDPA, and lists every case where it is.
#
# ## Say it yourself
#
# | | |
# |---|---|
# | one call | `ffpa_attn_func(..., backend="triton")` |
# | one model | `ffpa_hf.enable(model, backend="triton")`, `strict=True` to have an error instead of a stand-in |
# | one direction | `forward_backend="cuda", backward_backend="triton"` |
# | the whole process | `FFPA_DEFAULT_BACKEND=triton`, a preference |
# | with options | `TritonBackend(workspace_mb=2048)` in place of the name |
