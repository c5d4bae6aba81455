"""Where a quantised precision applies: which modules, from which denoising step on, for which lengths.

A module's owner answers `route` anew on every call; steps are counted by the scheduler, not by calls, so that guidance
in one batch or two, or a skipped call, changes nothing. Knows no kernel: it names backends, and the planner decides.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from ffpa_hf.backends import CUDABackend
from ffpa_hf.dispatch import Route, unqualified_here
from ffpa_hf.processors.capture import is_accelerated, subclass
from ffpa_hf.processors.generic import FFPAAttnProcessor

logger = logging.getLogger("ffpa_hf")

PRECISIONS = ("fp8", "fp4", "auto")
#: Whose kernels exist.
BUILT: frozenset[str] = frozenset({"fp8"})
#: precision="auto": keys from which on quantising pays for itself.
LONG = 4096

_STEPS = "_ffpa_steps"


@dataclasses.dataclass(frozen=True)
class ByLength(Route):
    """A route for short calls, with another one for those of `length` keys and more."""

    longer: Route = Route()
    length: int = 0

    def for_length(self, kv_len: int) -> Route:
        return self.longer if kv_len >= self.length else self


@dataclasses.dataclass(eq=False)
class Steps:
    """Scheduler steps of one pipeline run. past: whether the skipped ones are over (one flip, so one recompile)."""

    skip: int
    done: int = 0
    past: bool = False

    def __post_init__(self) -> None:
        self.past = self.done >= self.skip

    def restart(self) -> None:
        self.done = 0
        self.past = self.skip == 0

    def step(self) -> None:
        self.done += 1
        self.past = self.done >= self.skip


class QuantisedProcessor(FFPAAttnProcessor):
    """An FFPAAttnProcessor whose route is the quantised one once the skipped steps are over."""

    def __init__(self, plain: Route, quantised: Route, steps: Steps | None = None) -> None:
        self.plain, self.quantised, self.steps = plain, quantised, steps

    @property
    def route(self) -> Route:  # type: ignore[override]
        return self.plain if self.steps is not None and not self.steps.past else self.quantised

    def __repr__(self) -> str:
        return f"QuantisedProcessor({self.quantised!r}, steps={self.steps!r})"


def check(precision: str | None, skip_layers: Any, skip_first_steps: int | None) -> None:
    """Raise ValueError or TypeError for values that mean nothing, NotImplementedError for kernels that do not exist,
    RuntimeError for kernels that are not qualified on the present GPU."""
    if precision is None:
        if skip_layers is not None or skip_first_steps is not None:
            raise ValueError(
                "skip_layers and skip_first_steps choose where a precision applies; give precision with them."
            )
        return
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is not allowed; use None, 'fp8', 'fp4' or 'auto'.")
    if skip_first_steps is not None:
        if isinstance(skip_first_steps, bool) or not isinstance(skip_first_steps, int) or skip_first_steps < 0:
            raise ValueError(f"skip_first_steps={skip_first_steps!r} is not allowed; use a whole number from 0 up.")
    if isinstance(skip_layers, str) or not isinstance(skip_layers, (Sequence, set, frozenset, type(None))):
        raise TypeError(f"skip_layers={skip_layers!r}: give a list of names or indices.")
    if precision != "auto":
        if precision not in BUILT:
            raise NotImplementedError(f"precision={precision!r}: the quantised kernels are not built yet; use None.")
        if problem := unqualified(precision):
            raise RuntimeError(f"precision={precision!r}: {problem}; use None or 'auto' until then.")
    elif problem := _kept_back():
        logger.warning("precision='auto': %s; the input's own dtype is used.", problem)


def unqualified(precision: str) -> str:
    """Why the kernels of a precision may not run on the present GPU, which they are made for; empty where they may.

    Without such a GPU the answer is empty too: calls then go to SDPA and `report()` says why, as for any kernel.
    """
    return unqualified_here(CUDABackend(enable_fp8=precision == "fp8", enable_fp4=precision == "fp4"))


def _kept_back() -> str:
    """Why precision="auto" stays in the input's dtype whatever the length; empty where it does not."""
    return unqualified("fp8") if "fp8" in BUILT else "the quantised kernels are not built yet"


def quantised_route(precision: str, route: Route) -> Route:
    """`route` with its forward asked of the quantised kernels; for "auto" from `LONG` keys on, where those may run.

    Raises ValueError where the route already names another forward.
    """
    asked: Any = route.forward_backend or route.backend
    if asked is not None and not isinstance(asked, CUDABackend):
        raise ValueError(
            f"precision={precision!r} runs on the CUDA backend's quantised kernels; give it without "
            f"backend or forward_backend (here {asked.name!r}), or with a CUDABackend."
        )
    if precision == "auto" and _kept_back():
        return route
    forward = dataclasses.replace(asked or CUDABackend(), enable_fp8=precision != "fp4", enable_fp4=precision == "fp4")
    backward = route.backward_backend
    made = Route(None, forward, backward, route.strict)
    if precision != "auto":
        return made
    return ByLength(route.backend, route.forward_backend, backward, route.strict, longer=made, length=LONG)


def skipped(names: Sequence[str], skip_layers: Iterable[str | int] | None, prefix: str) -> set[str]:
    """Which of a model's attention modules `skip_layers` leaves in the input's dtype.

    names: in the model's order; an index counts along them (from the end where negative). A name is one of them, a
    part of the model above some (`transformer_blocks.0`), or a pattern with `*`; the pipeline's name of the model may
    stand before it (`transformer.transformer_blocks.0`).
    """
    found: set[str] = set()
    for wanted in skip_layers or ():
        if isinstance(wanted, int) and not isinstance(wanted, bool):
            if -len(names) <= wanted < len(names):
                found.add(names[wanted])
            continue
        if not isinstance(wanted, str):
            raise TypeError(f"skip_layers: {wanted!r} is neither a name nor an index.")
        inside = wanted.removeprefix(f"{prefix}.") if prefix else wanted
        found |= {
            name for name in names if name == inside or name.startswith(f"{inside}.") or fnmatch.fnmatch(name, inside)
        }
    return found


def unmatched(models: Iterable[tuple[Sequence[str], str]], skip_layers: Iterable[str | int] | None) -> list[str | int]:
    """The entries of `skip_layers` that no model knows."""
    known = list(models)
    return [
        wanted for wanted in skip_layers or () if not any(skipped(names, [wanted], prefix) for names, prefix in known)
    ]


# --- counting steps ---------------------------------------------------------------------------------------------------


def count_steps(scheduler: Any, steps: Steps) -> None:
    """Let a scheduler count into `steps`, from zero at each `set_timesteps`. Copies of it count for themselves."""
    stop_counting(scheduler)
    vars(scheduler)[_STEPS] = steps
    kind: Any = type(scheduler)
    scheduler.__class__ = counting_class(kind)


def stop_counting(scheduler: Any) -> None:
    """Give a scheduler its own class back. Nothing happens where it never counted."""
    if is_accelerated(scheduler):
        scheduler.__class__ = type(scheduler)._ffpa_original
        vars(scheduler).pop(_STEPS, None)


@functools.cache
def counting_class(original: Any) -> type:
    """The subclass of a scheduler class. A subclass, since pipelines copy schedulers and look at their signatures."""

    @functools.wraps(original.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original.step(self, *args, **kwargs)
        vars(self)[_STEPS].step()
        return result

    @functools.wraps(original.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self)[_STEPS].restart()
        return original.set_timesteps(self, *args, **kwargs)

    return subclass(original, {"step": step, "set_timesteps": set_timesteps}, counting_class)
