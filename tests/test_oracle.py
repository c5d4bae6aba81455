"""What the judge of the other tests lets pass."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_close, compare

EXACT = torch.tensor([1e-4, -2e-4], dtype=torch.float64)


def test_where_terms_cancel_twice_the_error_of_plain_torch_passes_and_no_more():
    def usual():
        return [torch.full_like(EXACT, 3e-5), torch.full_like(EXACT, -1e-4), torch.full_like(EXACT, torch.inf)]

    assert_close(EXACT + 1.9e-4, EXACT, torch.bfloat16, usual_errors=usual)
    for wrong, errors in ((EXACT + 2.1e-4, usual), (EXACT + 1.9e-4, None)):
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(wrong, EXACT, torch.bfloat16, usual_errors=errors)


def test_rounding_of_the_result_passes_without_asking_plain_torch():
    def never():
        raise RuntimeError

    assert_close(EXACT * 1.01, EXACT, torch.bfloat16, usual_errors=never)


# --- what cancels excuses no mistake ----------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Attention with sinks in bfloat16, its gradients by the formulas that kernels use; `flaw` spoils one of them."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, flaw):
        scores = (query.float() @ key.float().mT) * query.shape[-1] ** -0.5
        lse = torch.logaddexp(scores.logsumexp(-1), sinks[None, :, None])
        weights = torch.exp(scores - lse[..., None])
        out = (weights.to(value.dtype).float() @ value.float()).to(value.dtype)
        ctx.save_for_backward(query, key, value, sinks, weights, lse, out)
        ctx.flaw = flaw
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, sinks, weights, lse, out = ctx.saved_tensors
        delta = (grad.float() * out.float()).sum(-1)
        if ctx.flaw == "no row term":
            delta = delta * 0
        row = weights * (grad.float() @ value.float().mT - delta[..., None]) * query.shape[-1] ** -0.5
        share = -(torch.exp(sinks[None, :, None] - lse) * delta).sum((0, 2))
        if ctx.flaw == "sinks":
            share = share * 1.05
        if ctx.flaw == "lost key":
            row[..., 0] = 0.0
        gradients = row @ key.float(), row.mT @ query.float(), weights.mT @ grad.float()
        return *(each.to(query.dtype) for each in gradients), share, None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("flaw", ["none", "no row term", "sinks", "lost key"])
def test_gradients_with_a_mistake_do_not_pass_for_rounding(flaw, seed):
    torch.manual_seed(seed)
    tensors = {name: torch.randn(1, 2, 40, 64).bfloat16() for name in ("query", "key", "value")}
    tensors["sinks"] = torch.tensor([0.3, 1.0])
    # Values of a mean of their own: the row term is large, and so is each mistake beside the rounding.
    tensors["value"] = tensors["value"] + 2

    def judged():
        compare(lambda **given: _Attention.apply(*given.values(), flaw), dict(tensors))

    if flaw == "none":
        judged()
    else:
        with pytest.raises(AssertionError, match="gradient of"):
            judged()
