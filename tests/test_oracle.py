"""What the judge of the other tests lets pass."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_close

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
