"""What the tests judge by: attention in float64 written from its definition, and a comparison that includes gradients.

Must not use ffpa_hf.kernels.reference: a mistake in our own definition would hide in both.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ffpa_hf import explain, ffpa_attn_func, settings

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

#: ||error|| / ||truth|| that rounding alone explains, for results and inputs of a dtype.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Served:
    """One backend under test in one dtype; called like `ffpa_attn_func`, and sure to be the one that ran."""

    name: str
    dtype: torch.dtype

    @property
    def is_kernel(self) -> bool:
        return self.name != "sdpa"

    def forced(self) -> Any:
        """Kernels run whatever the size."""
        return settings.override(force_no_sdpa_fallback=True) if self.is_kernel else nullcontext()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **keywords: Any) -> Any:
        with self.forced():
            if query.numel() and key.numel():
                plan = explain(query, key, value, attn_mask, backend=self.name, **keywords)
                assert plan.forward == self.name, plan
            return ffpa_attn_func(query, key, value, attn_mask, backend=self.name, **keywords)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype or self.dtype)

    def qkv(
        self,
        batch: int = 2,
        heads: int = 2,
        rows: int = 10,
        keys: int = 10,
        width: int = 64,
        kv_heads: int | None = None,
    ) -> dict[str, Tensor]:
        kv_heads = heads if kv_heads is None else kv_heads
        return {
            "query": self.randn(batch, heads, rows, width),
            "key": self.randn(batch, kv_heads, keys, width),
            "value": self.randn(batch, kv_heads, keys, width),
        }


def built_kernels() -> list[str]:
    """Kernel backends whose folder can compute."""
    found = []
    for name in ("triton",):
        module = importlib.import_module(f"ffpa_hf.kernels.{name}")
        if hasattr(module, "supports") and hasattr(module, "forward"):
            found.append(name)
    return found


def _served() -> list[Any]:
    listed = [(Served("sdpa", torch.float32), ()), (Served("sdpa", torch.float16), ())]
    if HAS_GPU:
        listed.append((Served("sdpa", torch.bfloat16), ()))
    for name in built_kernels():
        if HAS_GPU:
            listed += [(Served(name, dtype), ()) for dtype in (torch.float16, torch.bfloat16)]
        else:  # the interpreter multiplies bf16 wrongly, and is slow: one dtype is enough for every day
            listed += [(Served(name, torch.float32), ()), (Served(name, torch.float16), (pytest.mark.slow,))]
    return [
        pytest.param(one, id=f"{one.name}-{str(one.dtype).removeprefix('torch.')}", marks=marks)
        for one, marks in listed
    ]


#: Everything that must give the same numbers.
BACKENDS = _served()
#: The kernels among them, for what only they promise.
KERNELS = [one for one in BACKENDS if one.values[0].is_kernel]
SDPA = [one for one in BACKENDS if not one.values[0].is_kernel]


def across(names: str, values: Sequence[Any], quick: Sequence[int] = (0,), backends: list[Any] | None = None) -> Any:
    """Parametrise over backends and `values`; interpreted kernels leave all but the `quick` ones to the slow run."""
    cases = []
    for one in BACKENDS if backends is None else backends:
        for index, value in enumerate(values):
            several = isinstance(value, tuple) and "," in names
            slow = one.values[0].is_kernel and not HAS_GPU and index not in quick
            label = "-".join(map(str, value)) if several else str(value)
            cases.append(
                pytest.param(
                    one.values[0],
                    *(value if several else (value,)),
                    id=f"{one.id}-{label}",
                    marks=(*one.marks, *((pytest.mark.slow,) if slow else ())),
                )
            )
    return pytest.mark.parametrize(f"backend, {names}", cases)


def truth(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    keep: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    drop: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention by the book. keep: bool, True for keys a row sees. drop: factors of the probabilities."""
    heads = max(query.shape[1], key.shape[1], value.shape[1])
    query, key, value = (t.repeat_interleave(heads // t.shape[1], 1) if t.shape[1] else t for t in (query, key, value))
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = torch.where(keep, scores, -torch.inf)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    alive = (scores > -torch.inf).any(-1, keepdim=True)
    scores = torch.where(alive, scores, 0.0)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.where(alive, torch.softmax(scores, -1), 0.0)
    if sinks is not None:
        weights = weights[..., :-1]
    if drop is not None:
        weights = weights * drop
    return weights.to(value.dtype) @ value, torch.where(alive, lse, -torch.inf).squeeze(-1)


def assert_close(
    actual: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    what: str = "result",
    usual_errors: Callable[[], Sequence[Tensor]] | None = None,
) -> None:
    """`actual` is `expected` (float64) within the rounding of `dtype`, and has infinities in the same places.

    usual_errors: errors (float64) of plain torch in `dtype` at the same result, asked for where rounding of the result
    does not explain the error: where terms cancel, twice the largest of them is allowed.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert not actual.isnan().any(), f"{what}: NaN"
    infinite = expected.isinf()
    assert torch.equal(actual.isinf(), infinite), f"{what}: infinities in other places"
    assert torch.equal(actual[infinite], expected[infinite]), f"{what}: infinities of another sign"
    actual, expected = actual[~infinite], expected[~infinite]
    if actual.numel() == 0:
        return
    tolerance = TOLERANCE[dtype]
    difference = actual - expected
    error, size = difference.norm().item(), expected.norm().item()
    worst, largest = difference.abs().max().item(), expected.abs().max().item()
    most, most_worst = tolerance * size + 1e-12, 4 * tolerance * largest + 1e-12
    if usual_errors is not None and (error > most or worst > most_worst):
        for usual in usual_errors():
            usual = usual.cpu()[~infinite]
            if usual.isfinite().all():  # else plain torch is lost itself, and excuses nothing
                most = max(most, 2 * usual.norm().item())
                most_worst = max(most_worst, 2 * usual.abs().max().item())
    assert error <= most, f"{what}: relative error {error / max(size, 1e-30):.2e}"
    assert worst <= most_worst, f"{what}: worst error {worst:.2e} beside {largest:.2e}"


def assert_gradient_close(
    actual: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    what: str,
    usual_errors: Callable[[], Sequence[Tensor]] | None = None,
) -> None:
    """`assert_close`; where a gradient cancels exactly, nothing but rounding of its terms may be left."""
    if expected.numel() and expected.abs().max() < 1e-9:
        assert actual.isfinite().all() and actual.abs().max() <= 10 * TOLERANCE[dtype], what
    else:
        assert_close(actual, expected, dtype, what, usual_errors)


def _gradient_errors(
    tensors: dict[str, Tensor],
    truth_keywords: dict[str, Any],
    seeds: list[Tensor],
    needs: tuple[str, ...],
    shaken: torch.Generator | None,
) -> dict[str, Tensor]:
    """By name, what the gradients of `truth` in the tensors' own dtypes are off from those in float64.

    shaken: draws by which query, key, value and the incoming gradients are moved first, by a rounding at most.
    """

    def moved(tensor: Tensor) -> Tensor:
        if shaken is None:
            return tensor.detach()
        draw = 2 * torch.rand(tensor.shape, generator=shaken, device=tensor.device) - 1
        return (tensor.detach().double() * (1 + torch.finfo(tensor.dtype).eps * draw)).to(tensor.dtype)

    # Masks keep their infinities and finite minima.
    given = {n: moved(t) if n in ("query", "key", "value") else t.detach() for n, t in tensors.items()}
    seeds = [moved(seed) for seed in seeds]

    def gradients(dtypes: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = {name: dtypes(tensor).detach().requires_grad_(name in needs) for name, tensor in given.items()}
        outputs = truth(**leaves, **truth_keywords)[: len(seeds)]
        weights = [seed.to(out.dtype) for seed, out in zip(seeds, outputs, strict=True)]
        grads = torch.autograd.grad(outputs, [leaves[name] for name in needs], weights, materialize_grads=True)
        return [grad.double() for grad in grads]

    plain, exact = gradients(lambda tensor: tensor.clone()), gradients(Tensor.double)
    return {name: ours - true for name, ours, true in zip(needs, plain, exact, strict=True)}


def _errors_of_row_terms(
    tensors: dict[str, Tensor], truth_keywords: dict[str, Any], seeds: list[Tensor], needs: tuple[str, ...]
) -> list[dict[str, Tensor]]:
    """By name, what the gradients are off if all is exact but the row term of softmax's gradient.

    Kernels take it from the output, sum(grad_out * out) (FlashAttention-2, Dao 2023): from an output that was rounded
    to query's dtype, and summed in float32, which loses about a rounding of the sum of magnitudes. Where a row sees one
    key, the gradient of its score is the difference of two such sums, which plain torch, that has one of them, knows to
    be nothing. An error of the term counts as a gradient of the log-sum-exp would.
    """
    leaves = {name: tensor.detach().double().requires_grad_(name in needs) for name, tensor in tensors.items()}
    out, lse = truth(**leaves, **truth_keywords)
    dtype = tensors["query"].dtype
    kept, summed = out.detach().to(dtype), torch.promote_types(dtype, torch.float32)
    exact = (seeds[0].double() * out.detach()).sum(-1)
    terms = seeds[0].double() * kept.double()
    rounded = terms.sum(-1) - exact
    signs = torch.randint(0, 2, rounded.shape, generator=torch.Generator().manual_seed(0)).to(rounded) * 2 - 1
    offs = rounded, rounded + signs * torch.finfo(summed).eps * terms.abs().sum(-1)
    wanted = [leaves[name] for name in needs]
    found = [torch.autograd.grad(lse, wanted, -off, retain_graph=True, materialize_grads=True) for off in offs]
    return [dict(zip(needs, grads, strict=True)) for grads in found]


def compare(
    run: Callable[..., Any],
    tensors: dict[str, Tensor],
    truth_keywords: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    needs: tuple[str, ...] | None = None,
) -> dict[str, Tensor]:
    """Run and differentiate; assert that output, log-sum-exp and every gradient equal the truth. Returns the gradients.

    run: called with `tensors` by name, gives out or (out, lse). truth_keywords: keywords of `truth`. dtype: whose
    rounding is allowed, query's by default. needs: names of the tensors that want a gradient, all by default.
    """
    dtype = dtype or tensors["query"].dtype
    needs = tuple(tensors) if needs is None else needs
    for name in needs:
        if tensors[name].is_leaf:
            tensors[name].requires_grad_()
    exact = {name: tensor.detach().double().requires_grad_(name in needs) for name, tensor in tensors.items()}
    result = run(**tensors)
    out, lse = result if isinstance(result, tuple) else (result, None)
    out_exact, lse_exact = truth(**exact, **(truth_keywords or {}))
    assert out.dtype == tensors["query"].dtype
    assert_close(out, out_exact, dtype, "out")
    outputs, exact_outputs, seeds = [out], [out_exact], [torch.randn_like(out_exact)]
    if lse is not None:
        assert lse.dtype == torch.float32
        dtype = max(dtype, torch.float32, key=lambda d: TOLERANCE[d])  # of what flows back through it as well
        assert_close(lse, lse_exact, dtype, "lse")
        outputs.append(lse)
        exact_outputs.append(lse_exact)
        seeds.append(torch.randn_like(lse_exact))
    if not needs:
        return {}
    seeds = [seed.to(given.dtype) for seed, given in zip(seeds, outputs, strict=True)]
    wanted = [tensors[name] for name in needs]
    found = torch.autograd.grad(outputs, wanted, seeds)
    expected = torch.autograd.grad(
        exact_outputs, [exact[name] for name in needs], [seed.double() for seed in seeds], materialize_grads=True
    )

    @functools.cache
    def usual_errors() -> list[dict[str, Tensor]]:
        """Of the gradients of plain torch in the dtypes of the call, on these inputs and on neighbours one rounding
        away: where terms cancel, the error is as random as the rounding, and one draw of it may be small by chance.
        And of gradients whose row term comes from an output kept in its dtype, as every kernel's does."""
        given = tensors, truth_keywords or {}, seeds, needs
        draws = torch.Generator(tensors["query"].device).manual_seed(0)  # the test's own draws stay what they were
        errors = [_gradient_errors(*given, shaken) for shaken in (None, draws, draws, draws)]
        return [*errors, *_errors_of_row_terms(*given)]

    for name, tensor, gradient, exact_gradient in zip(needs, wanted, found, expected, strict=True):
        assert gradient.dtype == tensor.dtype, f"gradient of {name}: {gradient.dtype}"
        coarse = max(dtype, tensor.dtype, key=lambda d: TOLERANCE[d])
        # P (dP - delta) may be all cancellation, and so may the sums over it.
        usual = functools.partial(lambda which: [errors[which] for errors in usual_errors()], name)
        assert_gradient_close(gradient, exact_gradient, coarse, f"gradient of {name}", usual)
    return dict(zip(needs, found, strict=True))
