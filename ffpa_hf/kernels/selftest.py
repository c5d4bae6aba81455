"""The numeric self-test of a kernel family: a grid of calls on the device it stands on, against the float64 reference.

Calls `forward` and `backward` of `kernels/<family>` as the operators do; knows no planner and keeps no verdict.
Families that are no attention have a grid and a judge of their own (`_SUITES`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import itertools
import math
import multiprocessing
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from ffpa_hf.backends import NAMES
from ffpa_hf.kernels.common import RANGE_BLOCK, AttentionInputs, aligned
from ffpa_hf.kernels.cuda.configs import WIDEST_TWIN
from ffpa_hf.kernels.philox import philox_keep_mask
from ffpa_hf.kernels.reference import attention
from ffpa_hf.kernels.sdpa import run as sdpa

Mask = Literal[
    "none",
    "causal",
    "bool",  # [B, Hq, Nq, Nkv], some rows without keys
    "bool keys",  # [B, 1, 1, Nkv]
    "bias",  # [B, 1, Nq, Nkv] in the input dtype
    "bias float32",  # [1, Hq, 1, Nkv]
    "bias minima",  # [1, 1, Nq, Nkv]: rows of finite minima, rows of -inf
    "window",
    "lower right",
    "packed",  # documents end to end, an empty one among them
    "holes",  # causal, keys missing on the left and in the middle
    "far apart",  # even rows see the first keys, odd rows the last: most keys between them are seen by none
]
Layout = Literal["BHND", "BNHD", "fused", "expanded", "unaligned"]

#: Half a unit in the last place, relative: what rounding an exact result to the dtype may cost.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
_LSE_LIMIT = 1e-3  # absolute, natural log, per unit of the largest one


#: The least finite log-sum-exp of a kernel, natural logarithm: -3.3e38 in base 2.
LOWEST_LSE = -3.3e38 * math.log(2.0)


@dataclass(frozen=True)
class Check:
    """One call, forward and backward. Names of sizes as in `AttentionInputs`."""

    dtype: torch.dtype
    head_dim: int
    q_len: int = 300
    kv_len: int = 300
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    mask: Mask = "none"
    layout: Layout = "BHND"
    dropout_p: float = 0.0
    softcap: float | None = None
    sinks: bool = False
    grad_lse: bool = False
    broadcast_grad: bool = False
    kernel: str = ""  # which of a family's kernels, where it has several

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}:{self.kv_heads}"
        words = [str(self.dtype).removeprefix("torch."), f"D{self.head_dim}", f"B{self.batch} H{heads}"]
        words += [f"{self.q_len}x{self.kv_len}", self.mask]
        words += ["decode"] if self.q_len < 8 else []
        words += [self.layout] if self.layout != "BHND" else []
        words += [f"dropout {self.dropout_p:g}"] if self.dropout_p else []
        words += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        words += ["sinks"] if self.sinks else []
        words += ["lse gradient"] if self.grad_lse else []
        words += ["broadcast gradient"] if self.broadcast_grad else []
        words += [self.kernel] if self.kernel else []
        return " ".join(words)


@dataclass
class Outcome:
    """errors: for each result (name, error, limit), error and limit relative to the norm of the float64 result."""

    check: Any
    passed: bool = False
    errors: list[tuple[str, float, float]] = field(default_factory=list)
    note: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> tuple[str, float, float] | None:
        """The result nearest to, or furthest over, its limit."""
        return max(self.errors, key=lambda e: math.inf if not e[1] < math.inf else e[1] / e[2], default=None)


# --- the grid ---------------------------------------------------------------------------------------------------------

#: What is varied on top of a dtype and head dim: every feature alone, and together where they meet in a kernel.
_FEATURES: tuple[dict[str, Any], ...] = (
    {"mask": "causal", "kv_heads": 1, "q_len": 513, "kv_len": 513},
    {"mask": "causal", "q_len": 200, "kv_len": 520, "kv_heads": 2},
    {"mask": "causal", "q_len": 520, "kv_len": 200},
    {"q_len": 1, "kv_len": 700, "heads": 8, "kv_heads": 1},
    {"q_len": 5, "kv_len": 515, "heads": 8, "kv_heads": 2, "batch": 2},
    {"q_len": 4, "kv_len": 900, "heads": 8, "kv_heads": 1, "mask": "lower right", "sinks": True, "grad_lse": True},
    {"q_len": 2, "kv_len": 900, "batch": 2, "kv_heads": 2, "mask": "bias", "dropout_p": 0.2},
    {"q_len": 1, "kv_len": 3000, "batch": 2, "kv_heads": 2, "mask": "bool keys", "softcap": 5.0},
    {"mask": "bool", "batch": 2, "kv_heads": 2},
    {"mask": "bool keys", "batch": 2},
    {"mask": "bias", "batch": 2},
    {"mask": "bias float32", "batch": 2, "kv_heads": 2},
    {"mask": "bias minima"},
    {"mask": "causal", "dropout_p": 0.2, "kv_heads": 2},
    {"mask": "window", "kv_heads": 2, "q_len": 600, "kv_len": 600},
    {"mask": "lower right", "q_len": 200, "kv_len": 520},
    {"mask": "packed", "q_len": 400, "kv_len": 450},
    {"mask": "holes", "batch": 2, "kv_heads": 2},
    {"mask": "far apart", "kv_heads": 2, "kv_len": 520},
    {"softcap": 5.0, "mask": "causal"},
    {"sinks": True, "grad_lse": True, "mask": "causal"},
    {"sinks": True, "softcap": 5.0, "dropout_p": 0.2, "mask": "window", "kv_heads": 2, "grad_lse": True},
    {"grad_lse": True, "mask": "bool"},
    {"layout": "BNHD", "kv_heads": 2},
    {"layout": "fused", "mask": "causal"},
    {"layout": "expanded", "mask": "bool", "batch": 2},
    {"layout": "unaligned"},
    {"broadcast_grad": True, "mask": "causal"},
)
_INTERVALS: tuple[Mask, ...] = ("window", "packed", "holes", "far apart")
_HEAD_DIMS = (64, 72, 96, 128, 192, 200, 256, 320, 384, 448, 512, 576, 640, 768, 1024)


#: Families tested by another module, which has its own `grid` and `run_check`, and the folder of their kernels.
_SUITES = {
    "triton-qkv": ("ffpa_hf.kernels.selftest_qkv", "triton"),
    "cuda-fp8": ("ffpa_hf.kernels.selftest_fp8", "cuda"),
}


def grid_of(family: str, interpreted: bool = False, is_hopper: bool = False) -> tuple[Any, ...]:
    """The calls to make for a family, none where it has no kernels for the device.

    interpreted: few, for Triton's interpreter. is_hopper: also kernels for sm_90.
    """
    if family == "cuda-fp8" and not is_hopper:
        return ()
    if family in _SUITES:
        return importlib.import_module(_SUITES[family][0]).grid(interpreted)
    if family == "cute":
        return _cute_grid() if is_hopper else ()
    return _forward_grid(is_hopper) if family == "cuda" else grid(interpreted)


def _forward_grid(is_hopper: bool) -> tuple[Check, ...]:
    """The calls of a forward without softcap and sinks, for each of the CUDA kernels that serve them."""
    calls = [check for check in grid() if check.softcap is None and not check.sinks and not check.broadcast_grad]
    calls = [replace(check, grad_lse=False) for check in calls]
    wide = [check for check in calls if check.head_dim <= WIDEST_TWIN and not check.dropout_p]
    calls = [replace(check, kernel="native") for check in calls]
    return tuple(calls + [replace(check, kernel="tma") for check in wide if is_hopper])


def _cute_grid() -> tuple[Check, ...]:
    """The calls that the CuTe-DSL forward serves, and one of a single key."""
    calls = [
        check for check in grid()
        if check.head_dim <= 320 and check.mask in ("none", "causal") and not check.dropout_p
        and check.softcap is None and not check.sinks and not check.broadcast_grad
    ]  # fmt: skip
    calls = [replace(check, grad_lse=False) for check in calls]
    return tuple(dict.fromkeys([*calls, Check(torch.bfloat16, 64, 300, 1)]))


def grid(interpreted: bool = False) -> tuple[Check, ...]:
    """The calls of attention. interpreted: a small grid in the dtypes that Triton's interpreter multiplies rightly."""
    if interpreted:
        small = [Check(torch.float16, 64, 40, 72, heads=2, kv_heads=2), Check(torch.float32, 72, 40, 40, mask="causal")]
        for feature in _FEATURES:
            shorter = {name: feature[name] // 8 + 3 for name in ("q_len", "kv_len") if feature.get(name, 0) > 8}
            small.append(replace(Check(torch.float16, 64, 40, 40), **{**feature, **shorter}))
        return tuple(small)
    half = (torch.bfloat16, torch.float16)
    checks = [
        Check(dtype, head_dim, mask="causal" if dtype is half[index % 2] else "none", kv_heads=2)
        for index, head_dim in enumerate(_HEAD_DIMS)
        for dtype in half
    ]
    for head_dim, dtype in ((512, half[0]), (128, half[1])):
        checks += [replace(Check(dtype, head_dim), **feature) for feature in _FEATURES]
    checks += [
        replace(Check(half[index % 2], head_dim, 600, 700, kv_heads=2), mask=mask)
        for index, (head_dim, mask) in enumerate(itertools.product((64, 192, 256), _INTERVALS))
    ]
    checks += [Check(half[0], 512, 2048, 2048), Check(half[0], 256, 2048, 2048, mask="window", kv_heads=2)]
    return tuple(checks)


# --- one call ---------------------------------------------------------------------------------------------------------


@dataclass
class _Problem:
    """A check's tensors: what the kernel gets, and what the reference needs beside them."""

    inputs: AttentionInputs
    hidden: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor | None
    keep: Tensor | None


def _build(check: Check, device: torch.device) -> _Problem:
    generator = torch.Generator(device).manual_seed(zlib.crc32(str(check).encode()))

    def normal(*shape: int, dtype: torch.dtype = check.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def chance(p: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device) < p

    batch, heads, q_len, kv_len = check.batch, check.heads, check.q_len, check.kv_len
    query, key, value = _layout(check, normal)
    inputs = AttentionInputs(query, key, value, scale=1.0 / math.sqrt(check.head_dim), softcap=check.softcap)
    inputs.is_causal = check.mask == "causal"
    if check.mask == "bool":
        inputs.mask = chance(0.7, batch, heads, q_len, kv_len)
        inputs.mask[:, 0, : q_len // 3] = False
    elif check.mask == "bool keys":
        inputs.mask = chance(0.7, batch, 1, 1, kv_len)
    elif check.mask == "bias":
        inputs.bias = normal(batch, 1, q_len, kv_len)
    elif check.mask == "bias float32":
        inputs.bias = normal(1, heads, 1, kv_len, dtype=torch.float32)
    elif check.mask == "bias minima":
        inputs.bias = normal(1, 1, q_len, kv_len)
        inputs.bias[:, :, ::7] = torch.finfo(check.dtype).min
        inputs.bias[:, :, 3::11] = -torch.inf
    elif check.mask in ("window", "lower right", "packed", "holes", "far apart"):
        _intervals(check, inputs, chance)
    if check.sinks:
        inputs.sinks = normal(heads, dtype=torch.float32)
    if check.dropout_p:
        inputs.dropout_p = check.dropout_p
        inputs.rng_state = torch.tensor([0x1234567890AB, 77], dtype=torch.int64, device=device)
    grad_out = normal(1, 1, 1, 1).expand(query.shape) if check.broadcast_grad else normal(*query.shape)
    grad_lse = normal(batch, heads, q_len, dtype=torch.float32) if check.grad_lse else None
    keep = None
    if inputs.rng_state is not None:
        keep = philox_keep_mask(inputs.rng_state, batch, heads, q_len, kv_len, check.dropout_p)
    return _Problem(inputs, _hidden(inputs), grad_out, grad_lse, keep)


def build_inputs(check: Check, device: torch.device) -> AttentionInputs:
    """The tensors of a check, without gradients."""
    return _build(check, device).inputs


def _layout(check: Check, normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    batch, width = check.batch, check.head_dim
    q_shape, k_shape = (batch, check.heads, check.q_len, width), (batch, check.kv_heads, check.kv_len, width)
    if check.layout == "BNHD":
        query = normal(batch, check.q_len, check.heads, width).transpose(1, 2)
        key, value = (normal(batch, check.kv_len, check.kv_heads, width).transpose(1, 2) for _ in range(2))
        return query, key, value
    if check.layout == "fused":  # one projection holding query, key and value
        parts = normal(batch, check.q_len, 3, check.heads, width).unbind(2)
        return parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2)
    if check.layout == "expanded":
        key, value = (normal(1, 1, check.kv_len, width).expand(k_shape) for _ in range(2))
        return normal(*q_shape), key, value
    if check.layout == "unaligned":  # rows one element apart from where vector loads want them

        def shifted(shape: tuple[int, ...]) -> Tensor:
            return normal(*shape[:-1], width + 1)[..., 1:]

        return shifted(q_shape), shifted(k_shape), shifted(k_shape)
    return normal(*q_shape), normal(*k_shape), normal(*k_shape)


def _intervals(check: Check, inputs: AttentionInputs, chance: Callable[..., Tensor]) -> None:
    device, q_len, kv_len = inputs.query.device, check.q_len, check.kv_len
    row = torch.arange(q_len, dtype=torch.int32, device=device)
    if check.mask == "window":
        start, end = row - max(8, q_len // 6), row + 1
    elif check.mask == "lower right":
        start, end = torch.zeros_like(row), row + 1 + (kv_len - q_len)
    elif check.mask == "packed":
        # Two documents; the keys between them belong to one without queries, and the last rows to none.
        first_q, first_k = q_len // 3, kv_len // 4
        start = torch.where(row < first_q, 0, kv_len // 2)
        end = torch.where(row < first_q, first_k, torch.where(row < q_len - 5, kv_len, 0))
    elif check.mask == "far apart":
        start = row % 2 * (kv_len - 20)
        end = start + 20
    else:
        start, end = torch.zeros_like(row), row + 1
        inputs.key_mask = chance(0.8, check.batch, kv_len)
        inputs.key_mask[0, : kv_len // 3] = False
    start, end = start.clamp(0, kv_len), end.clamp(0, kv_len)
    end = torch.maximum(start, end)
    inputs.row_start, inputs.row_end = start.to(torch.int32)[None], end.to(torch.int32)[None]
    # Rows that can see each block of keys, by looking at every pair: slower than the masks' own way, and not its code.
    key = torch.arange(kv_len, device=device)
    sees = (key >= start[:, None]) & (key < end[:, None])
    starts, ends = [], []
    for begin in range(0, kv_len, RANGE_BLOCK):
        rows = sees[:, begin : begin + RANGE_BLOCK].any(1)
        starts.append(torch.where(rows, row, q_len).amin())
        ends.append(torch.where(rows, row + 1, 0).amax())
    inputs.block_start = torch.stack(starts).to(torch.int32)[None]
    inputs.block_end = torch.stack(ends).to(torch.int32)[None]


def _hidden(inputs: AttentionInputs) -> Tensor | None:
    """The dense complement of every mask but a causal one, for the reference."""
    key = torch.arange(inputs.key.shape[2], device=inputs.query.device)
    keep = inputs.mask
    if inputs.row_start is not None and inputs.row_end is not None:
        inside = ((key >= inputs.row_start[..., None]) & (key < inputs.row_end[..., None]))[:, None]
        keep = inside if keep is None else keep & inside
    if inputs.key_mask is not None:
        present = inputs.key_mask[:, None, None, :]
        keep = present if keep is None else keep & present
    return None if keep is None else ~keep


_LEAVES = ("query", "key", "value", "bias", "sinks")


def _exact(problem: _Problem, *, plain: bool = False) -> dict[str, Tensor]:
    """Results and gradients in float64. plain: without what F.sdpa lacks (softcap, sinks, dropout, lse gradient)."""
    inputs = problem.inputs
    leaves = {
        name: getattr(inputs, name).detach().double().requires_grad_()
        for name in _LEAVES
        if getattr(inputs, name) is not None and not (plain and name == "sinks")
    }
    out, lse = attention(
        leaves["query"],
        leaves["key"],
        leaves["value"],
        scale=inputs.scale,
        is_causal=inputs.is_causal,
        mask=None if problem.hidden is None else ~problem.hidden,
        bias=leaves.get("bias"),
        sinks=leaves.get("sinks"),
        softcap=None if plain else inputs.softcap,
        keep=None if plain else problem.keep,
        dropout_p=0.0 if plain else inputs.dropout_p,
    )
    outputs, grads = [out], [problem.grad_out.double()]
    if problem.grad_lse is not None and not plain:
        outputs.append(lse.masked_fill(lse == -torch.inf, 0.0))
        grads.append(problem.grad_lse.double())
    found = torch.autograd.grad(outputs, list(leaves.values()), grads)
    named = {f"d{name}": grad for name, grad in zip(leaves, found, strict=True)}
    return {"out": out.detach(), "lse": _as_kernels_give(lse.detach()), **named}


def _as_kernels_give(lse: Tensor) -> Tensor:
    """Kernels work in base 2, where float32 ends at about -2.3e38 in natural units: below, they give that number."""
    return torch.where(lse == -torch.inf, lse, lse.clamp(min=LOWEST_LSE))


def _sdpa(problem: _Problem) -> dict[str, Tensor]:
    """The same call through F.sdpa in the same dtype, without what that lacks."""
    inputs = replace(problem.inputs, softcap=None, sinks=None, rng_state=None, dropout_p=0.0)
    leaves = {
        name: getattr(inputs, name).detach().requires_grad_()
        for name in ("query", "key", "value", "bias")
        if getattr(inputs, name) is not None
    }
    if inputs.bias is not None:  # F.sdpa takes a bias in query's dtype only
        leaves["bias"] = inputs.bias.detach().to(inputs.query.dtype).requires_grad_()
    out, _ = sdpa.forward(replace(inputs, **leaves))
    found = torch.autograd.grad(out, list(leaves.values()), problem.grad_out)
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(leaves, found, strict=True)}}


def _kernel(module: ModuleType, config: Any, problem: _Problem) -> dict[str, Tensor]:
    """The family's own results, through the same door as the operators: aligned rows, at most one copy each."""
    inputs = replace(
        problem.inputs,
        query=aligned(problem.inputs.query),
        key=aligned(problem.inputs.key),
        value=aligned(problem.inputs.value),
    )
    out, lse, row_stats = module.forward(inputs, config)
    if not hasattr(module, "backward"):
        return {"out": out, "lse": lse}
    needs = tuple(getattr(inputs, name) is not None for name in _LEAVES)
    grads = module.backward(
        inputs, aligned(out), lse, row_stats, aligned(problem.grad_out), problem.grad_lse, needs, config
    )
    named = {f"d{name}": grad for name, grad, needed in zip(_LEAVES, grads, needs, strict=True) if needed}
    return {"out": out, "lse": lse, **named}


@contextlib.contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Fresh tensors hold NaN, so that whatever a kernel forgets to write is seen."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]  # type: ignore[attr-defined]


def distances(given: Tensor, exact: Tensor) -> tuple[float, float]:
    """Relative error of the whole, and the largest single one beside the largest exact value; inf where not finite."""
    difference = given.double() - exact
    norm, peak = float(exact.norm()), float(exact.abs().amax()) if exact.numel() else 0.0
    whole, single = float(difference.norm()), float(difference.abs().amax()) if exact.numel() else 0.0
    if not math.isfinite(whole):
        return math.inf, math.inf
    return (whole / norm if norm else whole), (single / peak if peak else single)


def run_check(module: ModuleType, config: Any, check: Check, device: torch.device) -> Outcome:
    """Run one call forward and backward, twice, and judge it.

    A result passes with at most twice the error that F.sdpa has in the same dtype, plus rounding, and the same bits the
    second time. Whatever the kernel raises is an outcome too.
    """
    outcome = Outcome(check)
    begin = time.perf_counter()
    try:
        problem = _build(check, device)
        exact = _exact(problem)
        allowed = _allowed(problem, check)
        with nan_in_new_memory():
            given = _kernel(module, config, problem)
            again = _kernel(module, config, problem)
    except Exception as error:
        outcome.note = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]
        outcome.seconds = time.perf_counter() - begin
        return outcome
    rounding = ROUNDING[check.dtype]
    for name, result in given.items():
        if result is None:
            outcome.note = f"{name} is missing"
            outcome.errors.append((name, math.inf, rounding))
        elif name == "lse":
            outcome.errors.append(("lse", _lse_error(result, exact["lse"]), _LSE_LIMIT))
        elif result.shape != exact[name].shape:
            outcome.note = f"{name} has shape {tuple(result.shape)}, not {tuple(exact[name].shape)}"
            outcome.errors.append((name, math.inf, rounding))
        else:
            whole, single = distances(result, exact[name])
            whole_limit, single_limit = allowed.get(name, (3 * rounding, 12 * rounding))
            outcome.errors += [(name, whole, whole_limit), (f"{name} (one element)", single, single_limit)]
    passed = all(error <= limit for _, error, limit in outcome.errors)
    changed = [n for n, result in given.items() if result is not None and not torch.equal(result, again[n])]
    if passed and changed:
        passed, outcome.note = False, f"{', '.join(changed)} differ when run again"
    outcome.passed = passed
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _allowed(problem: _Problem, check: Check) -> dict[str, tuple[float, float]]:
    """Limits by result, for the whole and for one element: twice F.sdpa's error plus rounding.

    Where F.sdpa itself is far off or fails (its kernels have dead-row and mask faults of their own) its error is not
    trusted beyond a few roundings.
    """
    rounding = ROUNDING[check.dtype]
    try:
        plain, theirs = _exact(problem, plain=True), _sdpa(problem)
    except Exception:  # what F.sdpa cannot do at all leaves the default limits
        return {}
    limits = {}
    for name, result in theirs.items():
        whole, single = distances(result, plain[name])
        limits[name] = (2 * min(whole, 4 * rounding) + rounding, 2 * min(single, 8 * rounding) + 4 * rounding)
    return limits


def _lse_error(given: Tensor, exact: Tensor) -> float:
    dead = exact == -torch.inf
    if given.dtype != torch.float32 or not torch.equal(given == -torch.inf, dead):
        return math.inf
    difference = (given.double() - exact).masked_fill(dead, 0.0).abs()
    scale = max(1.0, float(exact.masked_fill(dead, 0.0).abs().amax()))
    error = float(difference.amax()) / scale
    return error if math.isfinite(error) else math.inf


def run(
    family: str,
    device: torch.device,
    checks: Sequence[Any] | None = None,
    on_check: Callable[[Outcome], None] = lambda outcome: None,
    *,
    jobs: int = 1,
) -> list[Outcome]:
    """Run a family's grid on a device. checks: None takes `grid_of` it, the small one off GPUs (the interpreter).

    jobs: processes that share the checks, since compiling takes most of the time. `on_check` is called as checks end;
    the outcomes are in the order of the checks. Raises ImportError where the family's compiler is not installed.
    """
    if checks is None:
        is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        checks = grid_of(family, device.type == "cpu", is_hopper)
    wanted = list(checks)
    importlib.import_module(f"ffpa_hf.kernels.{_SUITES[family][1] if family in _SUITES else family}")
    outcomes: dict[int, Outcome] = {}
    if jobs <= 1:
        for index, check in enumerate(wanted):
            outcomes[index] = _work(family, check, device)
            on_check(outcomes[index])
        return list(outcomes.values())
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_work, family, check, device): index for index, check in enumerate(wanted)}
        for future in concurrent.futures.as_completed(futures):
            index = futures[future]
            try:
                outcomes[index] = future.result()
            except Exception as error:  # the process died, and with it what it had still to do
                outcomes[index] = Outcome(wanted[index], note=f"{type(error).__name__}: {error}"[:200])
            on_check(outcomes[index])
    return [outcomes[index] for index in range(len(wanted))]


def _work(family: str, check: Any, device: torch.device) -> Outcome:
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if family in _SUITES:
        return importlib.import_module(_SUITES[family][0]).run_check(check, device)
    config = NAMES[family]
    if check.kernel:
        config = replace(config, family=check.kernel)  # type: ignore[arg-type,call-arg,type-var]
    return run_check(importlib.import_module(f"ffpa_hf.kernels.{family}"), config, check, device)
