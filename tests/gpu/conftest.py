"""Tests that need a GPU. They share it with the suite's other processes."""

from __future__ import annotations

import pytest
import torch

#: What a process may keep of the GPU's memory from one test to the next, bytes.
KEPT = 2**30


@pytest.fixture(autouse=True)
def memory_is_given_back():
    """Large tests leave nothing in torch's allocator that another process would miss."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()
