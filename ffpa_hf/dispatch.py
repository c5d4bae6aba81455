"""The planner: which backend serves a call, and why the others do not. Routing is data; nothing here computes.

Each backend answers `supports(call)`; `plan` reads the answers in the order of the contract. Under torch.compile only
comparisons with thresholds are made, so that a new length costs at most one recompile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ffpa_hf import settings
from ffpa_hf.backends import Backend, CUDABackend, CuTeDSLBackend, SDPABackend, TritonBackend, resolve_backend
from ffpa_hf.call import AttentionCall
from ffpa_hf.kernels import qualification
from ffpa_hf.kernels.common import Accepted, Answer, Refused, refuse
from ffpa_hf.kernels.tuning import generation, preferences, tables_changed

#: Shortest query and key lengths for which an explicitly requested kernel is worth its launch.
SHORT_LENGTH = 512
#: Query lengths below this are decoding, which kernels serve at any key length from `SHORT_LENGTH`.
DECODE_LENGTH = 8
#: Head dim up to which torch's own kernels are fast, so that auto keeps them where nothing was measured.
SMALL_HEAD_DIM = 256

KERNELS = ("cute", "triton", "cuda")
#: Up to this head dim, and from this many queries and keys on, auto asks CUDA before Triton on Hopper.
_CUDAS_HEAD_DIM, _CUDAS_LENGTH = 384, 1024
_DEFAULT_CONFIG: dict[str, Backend] = {
    "sdpa": SDPABackend(),
    "triton": TritonBackend(),
    "cuda": CUDABackend(),
    "cute": CuTeDSLBackend(),
}


class FallbackWarning(UserWarning):
    """A backend was asked for and SDPA ran instead; raised once per backend and reason."""


@dataclass(frozen=True)
class Route:
    """What was asked for. strict: the named backends are explicit; otherwise they are preferences."""

    backend: Backend | str | None = None
    forward_backend: Backend | str | None = None
    backward_backend: Backend | str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.strict, bool):
            raise TypeError(f"strict must be True or False, not {self.strict!r:.60} ({type(self.strict).__name__}).")
        for name in ("backend", "forward_backend", "backward_backend"):
            object.__setattr__(self, name, resolve_backend(getattr(self, name), name))
        if isinstance(self.backward_backend, CUDABackend):
            raise ValueError(
                "backward_backend='cuda': the CUDA backend has no backward; use 'triton', 'cute' or 'sdpa'."
            )

    def for_length(self, kv_len: int) -> Route:
        """The route of a call with so many keys: this one, whatever their number."""
        return self


class Candidate(NamedTuple):
    """One backend's answer to one call."""

    backend: str
    accepted: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """What will run and why. `forward` and `backward` are backend names; str() is a readable paragraph.

    error: what the call raises instead of running, or None. fallback: (backend, rule, reason) where an explicit request
    went to SDPA. composite: the SDPA backend uses its chunked plain-torch route.
    """

    call: AttentionCall
    forward: str
    backward: str | None
    forward_config: Backend
    backward_config: Backend | None
    reason: str
    candidates: tuple[Candidate, ...] = ()
    backward_reason: str = ""
    error: Exception | None = None
    fallback: tuple[str, str, str] | None = None
    composite: bool = False
    detail: str = ""

    @functools.cached_property
    def kind(self) -> tuple[str, str, str, str]:
        """What calls have in common that are counted together: (shape with a place for the lengths, forward, backward,
        reason)."""
        return self.call.shape_text("{}"), self.forward, self.backward or "none", self.reason

    def __str__(self) -> str:
        lines = [f"Attention {self.call.shape_text()} on {self.call.device_name or self.call.device_type}:"]
        if self.error is not None:
            lines.append(f"  raises {type(self.error).__name__}: {self.error}")
        else:
            lines.append(f"  forward   {self.forward}: {self.reason}")
            lines.append(f"  backward  {self.backward or 'none'}: {self.backward_reason}")
            if self.detail:
                lines.append(f"  kernel    {self.detail}")
        for candidate in self.candidates:
            verdict = "could serve it" if candidate.accepted else "refuses"
            lines.append(f"  {candidate.backend:<9} {verdict}: {candidate.reason}")
        return "\n".join(lines)


def ask(name: str, call: AttentionCall, config: Backend | None = None, *, backward: bool = False) -> Answer:
    """A backend's own answer, then the small-head-dim switch, then qualification; in the order of the contract."""
    config = config or _DEFAULT_CONFIG[name]
    module, problem = _MODULES[config.kernels]
    if _given_up and problem is None:
        problem = _given_up.get((config.kernels, int(call.head_dim)))
    if problem is not None:
        return refuse("not available", "unqualified", RuntimeError, "the {} backend is off: {}", name, problem)
    answer = module.supports(call, config, backward=backward)
    if isinstance(answer, Refused) and answer.kind != "unqualified":
        return answer
    current = settings.current()
    if name in KERNELS and call.head_dim <= SMALL_HEAD_DIM and not current.force_no_sdpa_fallback:
        if not getattr(current, f"{name}_allow_small_d"):
            return refuse("small head dim", "fallback", ValueError, "head_dim {} and FFPA_{}_ALLOW_SMALL_D=0",
                          call.head_dim, name.upper())  # fmt: skip
    if isinstance(answer, Accepted) and name in KERNELS and call.device_type == "cuda":
        if not current.allow_unqualified:  # the interpreter needs no verdict
            family = _FAMILIES[config.kernels]
            verdict = qualification.verdict(family, call.capability, call.is_rocm, call.device_name)
            if not verdict.qualified:
                return refuse("unqualified", "unqualified", RuntimeError, "the {} kernels are not qualified here: {}",
                              family, verdict.text)  # fmt: skip
    return answer


def short_sequence(name: str, call: AttentionCall) -> Refused | None:
    """The length rule for requested kernels: short calls go to F.sdpa, where that can express them."""
    if call.sdpa_expresses() is not None or settings.current().force_no_sdpa_fallback:
        return None
    decoding = call.q_len < DECODE_LENGTH and name != "cute"
    if (call.q_len < SHORT_LENGTH and not decoding) or call.kv_len < SHORT_LENGTH:
        return refuse(
            "short sequence", "fallback", ValueError,
            "a short sequence: kernels start at {} queries and keys", SHORT_LENGTH,
        )  # fmt: skip
    return None


def unqualified_here(config: Backend) -> str:
    """Why a backend's kernels, made for the present GPU, may not run on it before a self-test; empty where they may, or
    where there is no such GPU. Asked of a long bf16 call of head dim 128."""
    if not torch.cuda.is_available():
        return ""
    call = AttentionCall(
        1, 8, 8, 4096, 4096, 128, 128, torch.bfloat16, capability=torch.cuda.get_device_capability(),
        device_name=torch.cuda.get_device_name(), is_rocm=torch.version.hip is not None,
    )  # fmt: skip
    answer = ask(config.name, call, config)
    return answer.reason if isinstance(answer, Refused) and answer.rule == "unqualified" else ""


def _import_backend(name: str):
    """(module, None) of a backend, or (None, why it cannot be used)."""
    try:
        module = importlib.import_module(f"ffpa_hf.kernels.{name}")
        return (module, None) if module.supports else (None, "it cannot say what it supports")
    except Exception as problem:  # a broken optional package must not take the library with it
        return None, f"{type(problem).__name__}: {problem}"


#: Every backend's module; each imports its compiler when a call runs. A table, for torch.compile traces no import.
_MODULES = {name: _import_backend(name) for name in ("sdpa", *KERNELS, "cuda.fp8")}
#: The kernel family whose verdict counts for a module.
_FAMILIES = {name: name.replace(".", "-") for name in _MODULES}


#: Why kernels are not asked again: those of a module for a head dim.
_given_up: dict[tuple[str, int], str] = {}


def give_up(made: Plan, problem: str) -> None:
    """Leave a plan's forward kernels out at its head dim for the rest of this process: they cannot be built here. Plans
    are made anew."""
    _given_up[made.forward_config.kernels, made.call.head_dim] = problem
    tables_changed()


def plan(call: AttentionCall, route: Route | None = None) -> Plan:
    """Decide. Never raises for what the call asks: an impossible request comes back with `error` set."""
    return decide(call.facts, route)


def decide(facts: tuple[Any, ...], route: Route | None = None) -> Plan:
    """`plan(AttentionCall(*facts), route)`. A call like an earlier one costs one look-up: not even its description is
    made again."""
    route = route or _NO_WISH
    if torch.compiler.is_compiling() or not _PLAIN_SIZE.issuperset(map(type, facts[:_SIZES])):
        return _plan(AttentionCall(*facts), route)  # symbolic sizes have no hash
    return _decided(facts, route, settings.current(), generation())


_NO_WISH = Route()
_SIZES = 7  # the first fields of a call
_PLAIN_SIZE = frozenset({int})


@functools.lru_cache(maxsize=4096)
def _decided(facts: tuple[Any, ...], route: Route, _: settings.Settings, tables: int) -> Plan:
    call = AttentionCall(*facts)
    made = _plan(call, route)
    return replace(made, candidates=_candidates(call), detail=_detail(made, call))


_recalled: dict[tuple[Any, ...], tuple[settings.Settings, int, Plan]] = {}
_MOST_RECALLED = 4096


def recall(name: tuple[Any, ...]) -> Plan | None:
    """The plan that was remembered under a name, as long as settings and tables are those it was made with."""
    try:
        known = _recalled.get(name)
    except TypeError:  # symbolic sizes have no hash
        return None
    if known is None or known[0] is not settings.current() or known[1] != generation():
        return None
    return known[2]


def plan_state() -> tuple[settings.Settings, int]:
    """What a plan depends on beside its call: settings, and how often tables and verdicts have changed."""
    return settings.current(), generation()


def remember(name: tuple[Any, ...], made: Plan, state: tuple[settings.Settings, int]) -> None:
    """Keep a plan for `recall`. state: `plan_state()` from before the plan was made."""
    if len(_recalled) >= _MOST_RECALLED:
        _recalled.clear()
    with contextlib.suppress(TypeError):
        _recalled[name] = *state, made


def forget_plans() -> None:
    """Drop remembered plans. Tables and verdicts that change are counted in `generation`."""
    _decided.cache_clear()
    _recalled.clear()


def _plan(call: AttentionCall, route: Route) -> Plan:
    both = resolve_backend(route.backend)
    forward = resolve_backend(route.forward_backend, "forward_backend") or both
    # CuTe-DSL's own backward is the default behind its forward, and Triton's where that is not built.
    fills = _has_backward(both) and not (isinstance(both, CuTeDSLBackend) and route.forward_backend is None)
    backward = resolve_backend(route.backward_backend, "backward_backend") or (both if fills else None)
    explicit = route.strict and forward is not None
    impossible = _impossible_pair(forward, backward, call)
    if impossible is not None and (route.strict or forward is not None and forward.name == "sdpa"):
        return _failed(call, impossible)
    chosen: tuple[Backend, str] | Plan
    if call.batch == 0 or call.q_heads == 0 or call.q_len == 0 or call.kv_len == 0:
        if explicit and forward is not None:
            answer = ask(forward.name, call, forward)
            if isinstance(answer, Refused) and answer.kind == "error":  # a wrong argument is wrong at any size
                return _failed(call, _error(answer, call, forward.name))
        chosen = (SDPABackend(), "nothing to attend to")
    elif explicit:
        assert forward is not None
        chosen = _explicit(call, forward)
    else:
        chosen = _automatic(call, forward, backward, route.strict)
    if isinstance(chosen, Plan):
        made = chosen
        if made.error is not None:
            return made
        config = made.forward_config
        reason, fallback = made.reason, made.fallback
    else:
        config, reason = chosen
        fallback = None
    composite = config.name == "sdpa" and call.sdpa_composite() is not None
    backward_config, backward_reason, problem = _backward(call, config, backward, route.strict)
    if problem is not None and call.needs_grad:
        return _failed(call, problem)
    return Plan(
        call=call,
        forward=config.name,
        backward=None if backward_config is None else backward_config.name,
        forward_config=config,
        backward_config=backward_config,
        reason=reason,
        backward_reason=backward_reason,
        fallback=fallback,
        composite=composite,
    )


# --- forward ----------------------------------------------------------------------------------------------------------


def _explicit(call: AttentionCall, config: Backend) -> tuple[Backend, str] | Plan:
    """The requested backend, a documented fallback, or an error; never another kernel."""
    if config.name == "sdpa":
        return config, "asked for"
    answer = ask(config.name, call, config)
    if isinstance(answer, Accepted):
        short = short_sequence(config.name, call)
        if short is None:
            return config, "asked for"
        answer = short
    elif answer.kind == "unqualified":
        answer = short_sequence(config.name, call) or answer
    return _refused(answer, call, config.name)


def _refused(answer: Refused, call: AttentionCall, asked: str) -> Plan:
    """What an explicit request comes to that its backend refused: SDPA where the contract says so, else an error."""
    if answer.kind != "fallback" or settings.current().force_no_sdpa_fallback:
        return _failed(call, _error(answer, call, asked))
    reason = _text("{}, so SDPA runs instead of {}", answer.reason, asked)
    return Plan(call, "sdpa", None, SDPABackend(), None, reason, fallback=(asked, answer.rule, answer.reason))


def _automatic(
    call: AttentionCall, preferred: Backend | None, backward: Backend | None, strict: bool
) -> tuple[Backend, str] | Plan:
    """The first candidate that serves the call: preferences, then what was measured, then the rules of thumb."""
    current = settings.current()
    if strict and backward is not None and backward.name != "sdpa":
        answer = ask(backward.name, call, backward, backward=True)
        if isinstance(answer, Refused):  # no forward can make up for that
            return _refused(answer, call, backward.name)
    order: list[tuple[Backend, str, bool]] = []
    if preferred is not None:
        order.append((preferred, "preferred", True))
    default = resolve_backend(current.default_backend, "FFPA_DEFAULT_BACKEND")
    if default is not None:
        order.append((default, "first by FFPA_DEFAULT_BACKEND", True))
    for name, why in _auto_order(call):
        order.append((_DEFAULT_CONFIG[name], why, False))
    last: Refused | None = None
    for config, why, requested in order:
        if config.name == "sdpa":
            if current.force_no_sdpa_fallback or (strict and backward is not None and backward.name != "sdpa"):
                continue
            return config, why
        if backward is not None and strict and _impossible_pair(config, backward, call) is not None:
            continue
        answer = ask(config.name, call, config)
        if isinstance(answer, Accepted) and isinstance(config, CUDABackend) and not config.quantised:
            # Asked with or without a gradient, so that a checkpoint's two forwards are one and the same.
            if _backward(call, config, backward, strict)[2] is not None:
                answer = refuse("backward", "fallback", NotImplementedError,
                                "no backward serves this call behind the {} forward", config.name)  # fmt: skip
        if isinstance(answer, Accepted):
            short = short_sequence(config.name, call) if requested else None
            if short is None:
                return config, why
            answer = short
        last = last or answer
    if last is not None and (last.kind != "fallback" or current.force_no_sdpa_fallback):
        return _failed(call, _error(last, call, "auto"))
    why = last.reason if last is not None else "no kernel serves this call"
    reason = _text("{}, so SDPA runs", why)
    fallback = None if backward is None or not strict else (backward.name, last.rule if last else "no forward", why)
    return Plan(call, "sdpa", None, SDPABackend(), None, reason, fallback=fallback)


def _auto_order(call: AttentionCall) -> tuple[tuple[str, str], ...]:
    """Backend names with reasons, best first; SDPA is always among them."""
    if call.device_type != "cuda":
        if settings.current().force_no_sdpa_fallback:
            return tuple((name, "the only kind of kernel here") for name in KERNELS)
        return (("sdpa", "no kernel for tensors on " + call.device_type),)
    names = KERNELS if call.capability is not None and call.capability[0] == 9 else ("triton", "cute", "cuda")
    if _is_cudas_own(call):
        names = ("cute", "cuda", "triton")
    if call.sdpa_expresses() is not None:
        why = "F.sdpa cannot express the call"
    elif call.has_bias:
        why = "torch's fused kernels lose the gradient of rows whose scores are all finite minima"
    else:
        measured = preferences.prefer(call)
        if measured is not None:
            return tuple((name, "fastest as measured on this GPU model") for name in measured)
        if call.head_dim <= SMALL_HEAD_DIM and call.mask_kind != "intervals":
            return (("sdpa", "head dims up to 256 are torch's strength, and nothing was measured here"),) + tuple(
                (name, "SDPA is not allowed") for name in KERNELS
            )
        why = "head dims above 256 have no fast kernel in torch"
        if call.mask_kind == "intervals":
            why = "kernels skip what no row sees, and SDPA would need a dense mask"
    return tuple((name, why) for name in names) + (("sdpa", "no kernel serves this call"),)


def _is_cudas_own(call: AttentionCall) -> bool:
    """Whether CUDA's forward was the fastest on Hopper: 736 TFLOP/s at head dim 320 and 545 at 384 where Triton's made
    474 and 504 (benchmarks/results, 2026-12-01, cuda-tiles and kernels). Both have Triton's backward."""
    plain = call.mask_kind == "none" and not call.has_bias and call.dropout_p == 0.0
    long = call.q_len >= _CUDAS_LENGTH and call.kv_len >= _CUDAS_LENGTH
    return plain and long and SMALL_HEAD_DIM < call.head_dim <= _CUDAS_HEAD_DIM and call.capability == (9, 0)


# --- backward ---------------------------------------------------------------------------------------------------------


def _has_backward(config: Backend | None) -> bool:
    return config is not None and config.name != "cuda"


def _is_quantised(config: Backend) -> bool:
    return isinstance(config, CUDABackend) and config.quantised


def _may_pair(forward: Backend, backward: Backend) -> bool:
    if forward.name == "sdpa":
        return backward.name == "sdpa"
    if _is_quantised(forward):
        return backward.name in ("triton", "cute")
    return backward.name in ("triton", "cute", "sdpa")


def _impossible_pair(forward: Backend | None, backward: Backend | None, call: AttentionCall) -> Exception | None:
    if backward is None or forward is None:
        return None
    if not _may_pair(forward, backward):
        allowed = "'sdpa'" if forward.name == "sdpa" else "'triton' or 'cute'"
        return ValueError(
            f"forward_backend={forward.name!r} cannot pair with backward_backend={backward.name!r}: "
            f"that forward takes {allowed}."
        )
    if backward.name == "sdpa" and forward.name != "sdpa" and call.dropout_p > 0:
        return ValueError(
            "backward_backend='sdpa' recomputes through F.sdpa, which draws other numbers for dropout than the "
            f"{forward.name} forward (dropout_p={call.dropout_p:g}); use backward_backend='triton'."
        )
    return None


def _backward(
    call: AttentionCall, forward: Backend, asked: Backend | None, strict: bool
) -> tuple[Backend | None, str, Exception | None]:
    """(config, reason, what a needed gradient raises) of the backward that goes with a forward."""
    if forward.name == "sdpa":
        return SDPABackend(), "autograd through SDPA", None
    if asked is not None:
        impossible = _impossible_pair(forward, asked, call)
        if impossible is None:
            answer = Accepted() if asked.name == "sdpa" else ask(asked.name, call, asked, backward=True)
            if isinstance(answer, Accepted):
                return asked, "asked for" if asked.name != "sdpa" else "asked for; recomputes through F.sdpa", None
            impossible = _error(answer, call, asked.name)
        if strict:
            return None, str(impossible), impossible
    if isinstance(forward, CUDABackend):
        if forward.quantised:
            problem: Exception = ValueError(
                "A gradient is needed and the quantised CUDA forward has none by default; ask for one in the input "
                "dtype with backward_backend='triton', or run under torch.no_grad()."
            )
            return None, "quantised forwards have none by default", problem
        for name in ("cute", "triton"):
            if isinstance(ask(name, call, backward=True), Accepted):
                return _DEFAULT_CONFIG[name], "goes with the CUDA forward", None
        problem = NotImplementedError("No backward serves this call behind the CUDA forward; use backend='sdpa'.")
        return None, str(problem), problem
    answer = ask(forward.name, call, forward, backward=True)
    if isinstance(answer, Accepted):
        return forward, "the forward's own", None
    if isinstance(forward, CuTeDSLBackend) and isinstance(ask("triton", call, backward=True), Accepted):
        return _DEFAULT_CONFIG["triton"], "goes with the CuTe-DSL forward", None
    problem = _error(answer, call, forward.name)
    return None, str(problem), problem


# --- words ------------------------------------------------------------------------------------------------------------


def _text(template: str, *values: object) -> str:
    return template if torch.compiler.is_compiling() else template.format(*values)


def _failed(call: AttentionCall, error: Exception) -> Plan:
    return Plan(call, "none", None, SDPABackend(), None, str(error), error=error)


def _error(answer: Refused, call: AttentionCall, asked: str) -> Exception:
    """The refusal as the exception it raises, naming a backend that would take the call."""
    if torch.compiler.is_compiling():
        return answer.error(answer.reason)
    takers = [name for name in ("triton", *KERNELS) if name != asked and isinstance(ask(name, call), Accepted)]
    taker = takers[0] if takers else "sdpa"
    error = answer.error if answer.kind != "unqualified" or answer.rule == "not built" else RuntimeError
    hint = f"backend={taker!r} would serve this call"
    if answer.kind == "unqualified" and answer.rule == "unqualified":
        hint += "; run `ffpa-hf selftest` on this GPU to qualify the kernel, or set FFPA_ALLOW_UNQUALIFIED=1"
    return error(f"{answer.reason} ({hint}).")


def _candidates(call: AttentionCall) -> tuple[Candidate, ...]:
    rows = []
    for name in (*KERNELS, "sdpa"):
        answer = ask(name, call)
        if isinstance(answer, Accepted):
            rows.append(Candidate(name, True, answer.note or "its kernels take this call"))
        else:
            rows.append(Candidate(name, False, answer.reason))
    return tuple(rows)


def _detail(made: Plan, call: AttentionCall) -> str:
    module, _ = _MODULES[made.forward_config.kernels] if made.forward in KERNELS else (None, None)
    describe = getattr(module, "describe", None)
    return describe(call, made.forward_config) if describe is not None else ""
