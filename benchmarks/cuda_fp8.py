"""The FP8 forward on the Hopper GPU at hand: codes, scales and outputs first, then configurations beside F.sdpa.

    python benchmarks/cuda_fp8.py --out DIR [--only 128,512] [--checks-only | --times-only | --compile-only]

Works as benchmarks/cuda_tiles.py does, whose processes and limits it uses: kernels are compiled ahead without a GPU,
and the limit of a check or configuration counts from when its process had a context and was told to go. A check is one
of the self-test's: codes and scales bit for bit, outputs against float64 of what the codes stand for. A time is the
median over CUDA events; "with quantising" is the whole call, "kernel" its last part alone. FLOPs: 4 B H N^2 D.
`error` is that of one head's first rows against float64 of the inputs, beside the definition's own; the second pair is
with values whose mean is 2, where sums kept in few bits would show. Everything is written to DIR/cuda_fp8.json.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import cuda_tiles
import torch
from cuda_tiles import draw, median_ms

from ffpa_hf.kernels import quantised_reference, reference, selftest, selftest_fp8
from ffpa_hf.kernels.common import AttentionInputs
from ffpa_hf.kernels.cuda import fp8_launch, program
from ffpa_hf.kernels.cuda.fp8_configs import SMEM_LIMIT, Config, choose, config_of

BF16 = torch.bfloat16
#: Batch, heads and length of the timed calls by head dim; CogVideoX, FLUX and a long one, else 32 heads of 8192.
SHAPES = {64: [(2, 48, 17776)], 128: [(1, 24, 4608), (1, 32, 16384)], 256: [(1, 32, 8192)], 512: [(1, 32, 8192)]}
#: What is changed in the table's own configuration; the first row is the table's.
CHANGES: tuple[dict[str, Any], ...] = (
    {}, {"turns": False}, {"promote": True, "turns": False}, {"promote": True, "turns": True}, {"fold": 4},
    {"fold": 4, "turns": False}, {"fold": 4, "groups": 2}, {"groups": 2}, {"groups": 3},
)  # fmt: skip
ROWS = 128  # of which the error is taken


@functools.cache
def checks_of(head_dim: int) -> tuple[selftest.Check, ...]:
    return tuple(check for check in selftest_fp8.grid() if check.head_dim == head_dim)


CHECKED = tuple(sorted({check.head_dim for check in selftest_fp8.grid()}))


@functools.cache
def configs_of(head_dim: int) -> tuple[Config, ...]:
    """The table's configuration and the others that fit."""
    own, found = config_of(head_dim), []
    for change in CHANGES:
        config = replace(own, **change)
        wide = head_dim > 128 and (config.groups == 3 or config.fold)
        if not wide and config.smem <= SMEM_LIMIT and config not in found:
            found.append(config)
    return tuple(found)


def jobs_of(head_dim: int, what: str) -> list[Any]:
    if what == "check":
        return list(checks_of(head_dim))
    return [(shape, config) for shape in SHAPES[head_dim] for config in (None, *configs_of(head_dim))]


def variants(head_dims: list[int], checks: bool, times: bool) -> list[program.Variant]:
    """Everything that is run, without asking a device."""
    wanted: list[program.Variant] = []
    for check in [check for head_dim in head_dims if checks for check in checks_of(head_dim)]:
        masks = cuda_tiles.variant_of(check).macros
        named = {name: value for name, value in masks if name in ("CAUSAL", "INTERVALS", "MASK", "KEY_MASK")}
        bias = {"bias": check.dtype, "bias minima": check.dtype, "bias float32": torch.float32}.get(check.mask)
        config = choose(check.head_dim, bool(named["MASK"] or named["KEY_MASK"] or bias))
        features = {name.lower(): bool(value) for name, value in named.items()}
        wanted += [
            fp8_launch.variant(name, check.dtype, config) for name in ("fp8_statistics", "fp8_finish", "fp8_codes")
        ]
        wanted.append(fp8_launch.forward_variant(check.dtype, config, bias=bias, **features))
    for config in [config for head_dim in head_dims if times and head_dim in SHAPES for config in configs_of(head_dim)]:
        wanted += [fp8_launch.variant(name, BF16, config) for name in ("fp8_statistics", "fp8_finish", "fp8_codes")]
        wanted.append(fp8_launch.forward_variant(BF16, config))
    return list(dict.fromkeys(wanted))


# --- in a process of its own ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def case(shape: tuple[int, int, int], head_dim: int) -> tuple[AttentionInputs, AttentionInputs]:
    """Normal inputs in `[B, N, H, D]` memory, and the same with values of mean 2."""
    batch, heads, length = shape
    inputs = draw(batch, length, length, heads, heads, head_dim)
    inputs = replace(inputs, **{name: getattr(inputs, name).transpose(1, 2) for name in ("query", "key", "value")})
    return inputs, replace(inputs, value=inputs.value + 2)


def error_of(out: torch.Tensor, inputs: AttentionInputs) -> tuple[float, float]:
    """Relative error of the first rows of the first head, and the definition's."""
    query, key, value = inputs.query[:1, :1, :ROWS], inputs.key[:1, :1], inputs.value[:1, :1]
    exact, _ = reference.attention(query.double(), key.double(), value.double(), scale=inputs.scale)
    defined, _ = quantised_reference.quantised_attention(query, key, value, scale=inputs.scale)
    return selftest.distances(out[:1, :1, :ROWS], exact)[0], selftest.distances(defined, exact)[0]


def time_one(head_dim: int, shape: tuple[int, int, int], config: Config | None) -> str:
    batch, heads, length = shape
    inputs, lifted = case(shape, head_dim)
    work = 4e-9 * batch * heads * length * length * head_dim
    where = f"D={head_dim} {batch}x{heads}x{length}"
    if config is None:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        ms = median_ms(lambda: sdpa(inputs.query, inputs.key, inputs.value), 4)
        quantise = median_ms(lambda: fp8_launch.quantise(inputs, config_of(head_dim), True, False, 0))
        return f"{where} F.sdpa bf16 {ms:.3f} ms, {work / ms:.0f} TFLOP/s; quantising alone {1000 * quantise:.0f} us"
    errors = []
    for each in (inputs, lifted):
        with selftest.nan_in_new_memory():
            out, _, _ = fp8_launch.forward(each, config=config)
        errors.append(error_of(out, each))
    whole = median_ms(lambda: fp8_launch.forward(inputs, config=config))
    operands = fp8_launch.quantise(inputs, config, True, False, 0)
    out, lse = torch.empty_like(inputs.query), torch.empty(inputs.query.shape[:3], device="cuda")
    none = lse.new_empty(0)
    alone = median_ms(lambda: fp8_launch.attend(inputs, operands, config, out, lse, none, 0, 0))
    good = all(error <= 1.05 * defined + selftest.ROUNDING[BF16] for error, defined in errors[:1])
    return (
        f"{where} groups={config.groups} promote={config.promote} fold={config.fold} turns={config.turns}: "
        f"with quantising {whole:.3f} ms, {work / whole:.0f} TFLOP/s; kernel {alone:.3f} ms, {work / alone:.0f}; error "
        + ", ".join(f"{error:.4f} (definition {defined:.4f})" for error, defined in errors)
        + ("" if good else " WRONG")
    )


def child(head_dim: int, what: str, first: int) -> None:
    """Say "ready", wait for a line, then print one for each check or configuration from `first` on."""
    torch.ones(1, device="cuda").sum().item()
    print("ready", flush=True)
    sys.stdin.readline()
    for job in jobs_of(head_dim, what)[first:]:
        try:
            if what == "check":
                outcome = selftest_fp8.run_check(job, torch.device("cuda", 0))
                beyond = " ".join(f"{name} {error:.2g}>{limit:.2g}" for name, error, limit in outcome.errors
                                  if not error <= limit)  # fmt: skip
                print(f"{'ok' if outcome.passed else 'WRONG'} {job} {outcome.note} {beyond}".rstrip(), flush=True)
                broken = "CUDA" in outcome.note
            else:
                print(time_one(head_dim, *job), flush=True)
                broken = False
        except Exception as error:
            print(f"WRONG D={head_dim} {job}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            broken = isinstance(error, RuntimeError)
        if broken:  # a broken context answers nothing more
            os._exit(1)


class Watched(cuda_tiles.Watched):
    script = __file__


if __name__ == "__main__":
    raise SystemExit(cuda_tiles.command(__doc__, "cuda_fp8", CHECKED, SHAPES, variants, jobs_of, child, Watched))
