"""The Triton tuner: candidates for a bucket of shapes, each proven right and timed, the fastest kept.

Runs the launcher of `kernels/triton` on inputs of its own. What calls pass through every time is `kernels/triton/
choice.py`, which asks this module at most once per bucket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffpa_hf import settings
from ffpa_hf.kernels.common import AttentionInputs
from ffpa_hf.kernels.triton import choice, configs
from ffpa_hf.kernels.triton.configs import (
    BackwardConfig,
    DecodeConfig,
    ForwardConfig,
    FusedBackwardConfig,
    KeyValueConfig,
    ProductConfig,
    ScoresConfig,
    WideConfig,
)
from ffpa_hf.kernels.tuning import clock, store, tiles
from ffpa_hf.kernels.tuning.tiles import Bucket, Direction, Mode, Problem
from ffpa_hf.masks import RowIntervals

if TYPE_CHECKING:
    from ffpa_hf.call import AttentionCall

#: Another tile must be this much faster than the rule's to take its place: less is noise.
_GAIN = 1.02
#: Candidates this much slower than the best so far at their first look are not looked at again.
_HOPELESS = 1.3
#: Largest difference from the rule's result, relative to its norm: two orders of summation in bf16 differ by less.
_TOLERANCE = 2e-2
_FINALISTS = 4
_WINDOW = 1024

# --- candidates -------------------------------------------------------------------------------------------------------

# The short list: forms that were the best somewhere on a Hopper or an Ampere GPU.
_FUSED: tuple[ForwardConfig, ...] = (
    ForwardConfig(64, 128, 0, 512, 4, 1),
    ForwardConfig(64, 128, 0, 512, 8, 1),
    ForwardConfig(64, 64, 0, 512, 4, 1),
    ForwardConfig(64, 64, 0, 512, 4, 2),
    ForwardConfig(128, 64, 0, 512, 8, 2),
    ForwardConfig(128, 128, 0, 512, 8, 2),
    ForwardConfig(128, 128, 64, 256, 8, 4),
    ForwardConfig(64, 64, 64, 512, 8, 3),
    ForwardConfig(128, 64, 64, 512, 8, 3),
)
_FEW_ROWS: tuple[ForwardConfig, ...] = (
    ForwardConfig(16, 64, 0, 512, 4, 2),
    ForwardConfig(16, 128, 0, 512, 4, 2),
    ForwardConfig(16, 64, 64, 512, 4, 3),
    ForwardConfig(16, 32, 64, 512, 4, 3),
    ForwardConfig(32, 64, 64, 512, 4, 3),
)
_WIDE_SCORES = (
    ScoresConfig(128, 256, 64, 8, 3),
    ScoresConfig(128, 128, 64, 4, 3),
    ScoresConfig(128, 128, 32, 4, 4),
    ScoresConfig(128, 128, 64, 8, 4),
)
_SCORES = (
    ScoresConfig(128, 128, 64, 4, 3),
    ScoresConfig(128, 128, 64, 8, 3),
    ScoresConfig(128, 128, 32, 4, 4),
    ScoresConfig(64, 64, 64, 4, 3),
)
_PRODUCTS = (
    ProductConfig(128, 320, 64, 8, 4),
    ProductConfig(128, 256, 64, 8, 3),
    ProductConfig(128, 128, 64, 8, 3),
    ProductConfig(128, 128, 64, 4, 3),
)
_KEYS = (
    KeyValueConfig(64, 64, 4, 2),
    KeyValueConfig(64, 64, 8, 2),
    KeyValueConfig(64, 128, 8, 2),
)


def candidates(bucket: Bucket, target: configs.Target, mode: Mode) -> tuple[Any, ...]:
    """Legal configs for a bucket, the rule's first. "fast": a short list; "max": the whole grid.

    Parts of a config that are kernels of their own (scores, products) are varied one at a time; `tune` then joins the
    best of each.
    """
    ruled = choice.by_rule(bucket.direction, problem_of(bucket), target)
    if bucket.direction == "backward":
        found = _backwards(ruled, mode)
        if not bucket.busy:
            materialised = configs.choose_materialised(bucket.head_dim, target.smem_limit, 2, target.tma)
            found = itertools.chain(_fused_backwards(ruled, mode), _backwards(materialised, mode))
    elif isinstance(ruled, DecodeConfig):
        found = _decodes(mode)
    elif bucket.q_len <= 16:
        found = itertools.chain(_FEW_ROWS, _fused_grid((16, 32)) if mode == "max" else ())
    else:
        fused = list(_FUSED if mode == "fast" else _fused_grid((64, 128)))
        if bucket.mask == "intervals":  # where ranges are short, one loop may do better than three
            fused += [replace(config, phased=False) for config in fused[: 6 if mode == "fast" else None]]
        found = itertools.chain(fused, _wides(bucket, target, mode))
    legal: dict[Any, Any] = {}
    for config in (ruled, *found):
        if configs.is_legal(config, bucket.head_dim, target.smem_limit, 2, target.tma):
            legal.setdefault(_plain(config, bucket.head_dim), config)
    return tuple(legal.values())


def _fused_grid(rows: Sequence[int]) -> Iterator[ForwardConfig]:
    grid = itertools.product(rows, (32, 64, 128), (0, 32, 64, 128), (256, 320, 512), (4, 8), (1, 2, 3, 4))
    return (ForwardConfig(*fields) for fields in grid)


def _decodes(mode: Mode) -> Iterator[DecodeConfig]:
    if mode == "fast":
        grid = itertools.product((16,), (16, 32, 64), (4,), (3, 4), (1, 2))
    else:
        grid = itertools.product((16,), (16, 32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3))
    return (DecodeConfig(*fields) for fields in grid)


def _scores_grid() -> Iterator[ScoresConfig]:
    grid = itertools.product((64, 128), (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4))
    return (ScoresConfig(*fields) for fields in grid)


def _products_grid() -> Iterator[ProductConfig]:
    grid = itertools.product((64, 128), (128, 256, 320), (32, 64, 128), (4, 8), (2, 3, 4))
    return (ProductConfig(*fields) for fields in grid)


def _wides(bucket: Bucket, target: configs.Target, mode: Mode) -> Iterator[WideConfig]:
    """Two-kernel forwards; they need descriptors and pay where heads are wide or, in a full search, at any head dim."""
    if not target.tma or target.tensor_memory or bucket.q_len <= 64 or (mode == "fast" and bucket.head_dim <= 256):
        return
    product = _PRODUCTS[0]
    for scores in _WIDE_SCORES if mode == "fast" else _scores_grid():
        yield WideConfig(scores, replace(product, block=scores.block_m))
    if mode == "max":
        for product in _products_grid():
            yield from (WideConfig(scores, product) for scores in _WIDE_SCORES[:2])


def _backwards(ruled: BackwardConfig, mode: Mode) -> Iterator[BackwardConfig]:
    for scores in _SCORES if mode == "fast" else _scores_grid():
        yield replace(ruled, scores=scores)
    for product in _PRODUCTS if mode == "fast" else _products_grid():
        yield replace(ruled, query=product)
        yield replace(ruled, key=product)


def _keys_grid() -> Iterator[KeyValueConfig]:
    grid = itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3))
    return (KeyValueConfig(*fields) for fields in grid)


def _fused_backwards(ruled: Any, mode: Mode) -> Iterator[FusedBackwardConfig]:
    if not isinstance(ruled, FusedBackwardConfig):
        return
    for keys in _KEYS if mode == "fast" else _keys_grid():
        yield replace(ruled, keys=keys)
    for product in _PRODUCTS if mode == "fast" else _products_grid():
        yield replace(ruled, query=product)


def _plain(config: Any, head_dim: int) -> Any:
    """A config with widths as they come out at a head dim: two that launch alike are one candidate."""
    if isinstance(config, (ForwardConfig, ProductConfig)):
        columns = configs.split_columns(head_dim, config.width)
        config = replace(config, width=columns.width)
        return replace(config, chunk=0) if isinstance(config, ForwardConfig) and config.chunk >= head_dim else config
    if isinstance(config, WideConfig):
        return replace(config, product=_plain(config.product, head_dim))
    if isinstance(config, BackwardConfig):
        return replace(config, query=_plain(config.query, head_dim), key=_plain(config.key, head_dim))
    if isinstance(config, FusedBackwardConfig):
        return replace(config, query=_plain(config.query, head_dim))
    return config


def problem_of(bucket: Bucket) -> Problem:
    """The one call that is timed for a bucket."""
    q_heads = max(bucket.lanes, bucket.group)
    sizes = bucket.head_dim, 1, q_heads, q_heads // bucket.group, bucket.q_len, bucket.kv_len
    return Problem(*sizes, bucket.mask, bucket.busy, 2, bucket.workspace_mb)


# --- running ----------------------------------------------------------------------------------------------------------


class Setup:
    """Inputs of a bucket on a device, and the launcher run on them with given tiles."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        from ffpa_hf.kernels.triton import launch

        self._launch, self._bucket = launch, bucket
        problem = problem_of(bucket)
        # Numbers of our own: the caller's generator must not move because something was tuned.
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, length: int) -> Tensor:
            shape = (1, heads, length, bucket.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        q_len, kv_len = bucket.q_len, bucket.kv_len
        query, key, value = (normal(problem.q_heads, q_len), *(normal(problem.kv_heads, kv_len) for _ in range(2)))
        self._inputs = AttentionInputs(query, key, value, bucket.head_dim**-0.5, is_causal=bucket.mask == "causal")
        if bucket.mask == "intervals":
            window = RowIntervals.sliding_window(q_len, kv_len, _WINDOW, device, lower_right=kv_len > q_len)
            first, last = window.query_ranges(kv_len)
            self._inputs = replace(
                self._inputs, row_start=window.start, row_end=window.end, block_start=first, block_end=last
            )
        if bucket.busy:
            drawn = torch.rand(1, 1, q_len, kv_len, generator=generator, device=device)
            self._inputs = replace(self._inputs, mask=drawn > 0.1)
        if bucket.direction == "backward":
            self._grad = normal(problem.q_heads, q_len)
            self._saved = launch.forward(self._inputs, bucket.workspace_mb, tiles=self._forward_tiles(device))

    def _forward_tiles(self, device: torch.device) -> Any:
        target = self._launch._target(device)
        return choice.by_rule("forward", problem_of(self._bucket), target)

    def run(self, config: Any) -> tuple[Tensor, ...]:
        """The results of one call with a config: out and log-sum-exp, or the gradients of query, key and value."""
        with torch.no_grad():
            if self._bucket.direction == "forward":
                return self._launch.forward(self._inputs, self._bucket.workspace_mb, tiles=config)[:2]
            needs = (True, True, True, False, False)
            found = self._launch.backward(
                self._inputs, *self._saved, self._grad, None, needs, self._bucket.workspace_mb, tiles=config
            )
            return found[:3]


@contextlib.contextmanager
def _empty_is_nan() -> Iterator[None]:
    """What a kernel leaves unwritten shows: torch fills new memory with NaN in deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Whether all numbers are there and differ from what the rule's tiles gave by rounding only."""
    for mine, theirs in zip(found, expected, strict=True):
        finite = torch.where(theirs == float("-inf"), 0.0, theirs.float())
        mine = torch.where(theirs == float("-inf"), torch.where(mine == theirs, 0.0, float("nan")), mine.float())
        if not bool((mine - finite).norm() <= _TOLERANCE * finite.norm()):  # NaN is no agreement
            return False
    return True


# --- one bucket -------------------------------------------------------------------------------------------------------


def tune(
    bucket: Bucket,
    device: torch.device,
    mode: Mode = "fast",
    *,
    seconds: float = 0.3,
    setup: Callable[[Bucket, torch.device], Any] = Setup,
    sampler: Callable[..., Any] = clock.Sampler,
    target: configs.Target | None = None,
    on_step: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time a bucket's candidates on a device; returns the table's row.

    seconds: sampling time of the last round, shared by the finalists. Each candidate first runs into memory filled
    with NaN and must agree with the rule's result. A config that fails is passed over; what the rule's own raises
    (torch.OutOfMemoryError where the bucket's inputs do not fit) goes to the caller.
    """
    target = target or _target_of(device)
    prepared = setup(bucket, device)
    ruled, *others = candidates(bucket, target, mode)
    with _empty_is_nan():
        expected = prepared.run(ruled)
    timed = {ruled: sampler(lambda: prepared.run(ruled), device)}

    def look(config: Any) -> None:
        on_step(f"{len(timed)}: {config}")
        try:
            with _empty_is_nan():
                right = _agree(prepared.run(config), expected)
            if right:
                timed[config] = sampler(lambda: prepared.run(config), device)
        except Exception:  # does not compile, or does not fit: no candidate
            _collect(device)

    for config in others:
        look(config)
    for config in _joined(timed, ruled):
        if config not in timed and configs.is_legal(config, bucket.head_dim, target.smem_limit, 2, target.tma):
            look(config)
    best = min(one.estimate for one in timed.values())
    finalists = sorted((c for c in timed if timed[c].estimate <= _HOPELESS * best), key=lambda c: timed[c].estimate)
    finalists = [ruled, *(config for config in finalists[:_FINALISTS] if config != ruled)]
    times = clock.medians([timed[config] for config in finalists], seconds)
    ruled_ms = times[0]
    ms, winner = min(zip(times, finalists, strict=True), key=lambda pair: pair[0])
    if ms * _GAIN > ruled_ms:
        ms, winner = ruled_ms, ruled
    return {
        "tiles": choice.encode(winner),
        "ms": round(ms, 5),
        "rule_ms": round(ruled_ms, 5),
        "tried": len(timed),
        "mode": mode,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _joined(timed: dict[Any, Any], ruled: Any) -> list[Any]:
    """Configs that join the fastest of each part that was varied alone."""
    if isinstance(ruled, (BackwardConfig, FusedBackwardConfig)):
        return [*_best_parts(timed, BackwardConfig, "scores"), *_best_parts(timed, FusedBackwardConfig, "keys")]
    wide = [config for config in timed if isinstance(config, WideConfig)]
    products: dict[ScoresConfig, list[WideConfig]] = {}
    for config in wide:
        products.setdefault(config.scores, []).append(config)  # the first of each with the same product
    compared = [config for tried in products.values() if len(tried) > 1 for config in tried]
    if not compared:
        return []
    product = min(compared, key=lambda c: timed[c].estimate).product
    scores = min(products, key=lambda s: timed[products[s][0]].estimate)
    return [WideConfig(scores, replace(product, block=scores.block_m))]


def _best_parts(timed: dict[Any, Any], kind: type, main: str) -> list[Any]:
    """Configs of a kind that join the fastest of each part that was varied alone, with its main kernel and without."""
    tried = [config for config in timed if type(config) is kind]
    if not tried:
        return []
    base, parts = tried[0], {}
    for field in dataclasses.fields(base):
        alone = [c for c in tried if replace(c, **{field.name: getattr(base, field.name)}) == base]
        parts[field.name] = getattr(min(alone, key=lambda c: timed[c].estimate), field.name)
    return [replace(base, **parts), replace(base, **{**parts, main: getattr(base, main)})]


def _target_of(device: torch.device) -> configs.Target:
    from ffpa_hf.kernels.triton import launch

    return launch._target(device)


def _collect(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- in a user's call -------------------------------------------------------------------------------------------------

_announced = False


def tune_now(bucket: Bucket, device: torch.device, device_name: str, mode: Mode) -> bool:
    """Tune a bucket that a call has just met, and keep the row; False where that failed and the rules stay.

    Says so once per process on the error stream (not under FFPA_LOG=error). Never raises.
    """
    global _announced
    quiet = settings.current().log == "error"
    if not quiet and (not _announced or settings.current().log == "debug"):
        _announced = True
        print(
            f"ffpa_hf: autotune=True: timing Triton tiles once per new bucket of shapes, now {bucket.key}; kept in "
            f"{store.config_dir()}.",
            file=sys.stderr,
        )
    try:
        found = tune(bucket, device, mode)
    except Exception as problem:  # a call that works without tuning must not fail because of it
        if not quiet:
            print(f"ffpa_hf: {bucket.key} is not tuned ({type(problem).__name__}: {problem}).", file=sys.stderr)
        return False
    try:
        tiles.keep(device_name, bucket, found)
    except OSError as problem:  # the row holds for this process all the same
        if not quiet:
            print(f"ffpa_hf: tuned tiles cannot be kept ({problem}).", file=sys.stderr)
    return True


# --- which buckets ----------------------------------------------------------------------------------------------------


def default_buckets(workspace_mb: int = 1024) -> list[Bucket]:
    """What `ffpa-hf autotune` tunes without a recorded run, the most wanted first."""
    shapes: list[tuple[int, int, int, int, str]] = []  # head dim, batched query heads, group, length, mask
    for head_dim in (512, 256, 128, 64, 320, 384, 640, 1024):
        for length in (8192, 4096):
            shapes += [(head_dim, 16, 1, length, "none"), (head_dim, 16, 1, length, "causal")]
    shapes += [(512, 16, 8, length, mask) for length in (8192, 4096) for mask in ("causal", "intervals")]
    shapes += [(head_dim, 16, 2, 8192, "intervals") for head_dim in (256, 128, 64)]
    shapes += [(512, 1, 1, length, "none") for length in (16384, 4096)]
    shapes += [(head_dim, 16, 1, 2048, "causal") for head_dim in (512, 256)]
    problems = [
        Problem(head_dim, 1, heads, heads // group, length, length, mask, False, 2, workspace_mb)  # type: ignore[arg-type]
        for head_dim, heads, group, length, mask in shapes
    ]
    directions: tuple[Direction, ...] = ("forward", "backward")
    found = [problem.bucket(direction) for problem in problems for direction in directions]
    for head_dim, kv_len in itertools.product((512, 256, 128, 64), (8192, 1024)):
        found.append(Problem(head_dim, 1, 32, 4, 1, kv_len, "none", False, 2, workspace_mb).bucket("forward"))
    return found


def buckets_of(calls: Iterable[AttentionCall], workspace_mb: int = 1024) -> list[Bucket]:
    """The buckets of some calls, each once, in their order; calls that Triton does not take are left out."""
    found: dict[Bucket, None] = {}
    for call in calls:
        served = 64 <= call.head_dim <= 1024 and call.head_dim % 8 == 0 and call.value_dim == call.head_dim
        empty = 0 in (call.batch, call.q_heads, call.kv_heads, call.q_len, call.kv_len)
        if not served or empty or call.rank != 4 or call.dtype not in (torch.bfloat16, torch.float16):
            continue
        mask = "causal" if call.is_causal else "intervals" if call.mask_kind == "intervals" else "none"
        busy = call.mask_kind == "bool" or call.has_bias or call.softcap is not None or call.dropout_p > 0
        sizes = call.head_dim, call.batch, call.q_heads, call.kv_heads, call.q_len, call.kv_len
        problem = Problem(*sizes, mask, busy, 2, workspace_mb)  # type: ignore[arg-type]
        found[problem.bucket("forward")] = None
        if call.needs_grad:
            found[problem.bucket("backward")] = None
    return list(found)


# --- ahead of time ----------------------------------------------------------------------------------------------------


def compile_ahead(buckets: Sequence[Bucket], mode: Mode, device_name: str, index: int, count: int) -> int:
    """Run every `count`-th candidate of some buckets once, so that Triton's cache has it; for worker processes.

    Returns how many ran. Failures are for `tune` to see.
    """
    device = torch.device(device_name)
    torch.cuda.set_device(device)
    target, ran = _target_of(device), 0
    for bucket in buckets:
        prepared = None
        for config in candidates(bucket, target, mode)[index::count]:
            with contextlib.suppress(Exception):
                prepared = prepared or Setup(bucket, device)
                prepared.run(config)
                ran += 1
    torch.cuda.synchronize(device)
    return ran


def without_doubles(buckets: Sequence[Bucket]) -> list[Bucket]:
    """One bucket of each that need the same kernels: lengths and heads are no part of what is compiled."""
    kinds: dict[tuple[Direction, int, str, bool, bool, bool], Bucket] = {}
    for bucket in buckets:
        kind = (
            bucket.direction, bucket.head_dim, bucket.mask, bucket.busy, bucket.q_len <= 16, bucket.group > 1,
        )  # fmt: skip
        least = kinds.get(kind)
        if least is None or bucket.q_len * bucket.kv_len * bucket.lanes < least.q_len * least.kv_len * least.lanes:
            kinds[kind] = bucket
    return list(kinds.values())
