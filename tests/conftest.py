"""Shared fixtures. Without a GPU the Triton kernels run in Triton's interpreter, so every machine runs every test."""

from __future__ import annotations

import os
import sys

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # must be decided before Triton is imported anywhere
    os.environ["TRITON_INTERPRET"] = "1"
else:  # these tests are what qualifies a kernel
    os.environ.setdefault("FFPA_ALLOW_UNQUALIFIED", "1")

import pytest  # noqa: E402

from ffpa_hf import settings  # noqa: E402
from ffpa_hf.functional import _warned  # noqa: E402
from ffpa_hf.report import reset  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; deselected where there is none")
    config.addinivalue_line("markers", "slow: a large grid, run by `make test-slow`")
    config.addinivalue_line("markers", "quantised: needs torchao and bitsandbytes; run by `make test-quantised`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unwanted = set() if HAS_GPU else {"gpu"}
    if "quantised" not in config.option.markexpr:  # asked for by name, where its packages are
        unwanted.add("quantised")
    gone = [item for item in items if any(item.get_closest_marker(mark) for mark in unwanted)]
    if gone:
        items[:] = [item for item in items if not any(item.get_closest_marker(mark) for mark in unwanted)]
        config.hook.pytest_deselected(items=gone)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def kernel_dtype() -> torch.dtype:
    """A dtype in which kernels are right on `device`: the interpreter multiplies bf16 wrongly."""
    return torch.bfloat16 if HAS_GPU else torch.float16


@pytest.fixture
def forced():
    """Kernels run whatever the size; SDPA never stands in for them."""
    with settings.override(force_no_sdpa_fallback=True):
        yield


@pytest.fixture
def no_interpreter():
    """As on a machine without a GPU where nobody asked for the interpreter."""
    with settings.override(triton_interpret=False):
        yield


@pytest.fixture(autouse=True)
def _fresh_state():
    """Each test sees its own warnings and counters, and the same random numbers."""
    torch.manual_seed(0)
    _warned.clear()
    interface = sys.modules.get("ffpa_hf.patches.attention_interface")
    if interface is not None:
        interface._warned.clear()
    reset()


@pytest.fixture(autouse=True)
def _uninitialised_is_nan(request: pytest.FixtureRequest):
    """What a kernel leaves unwritten is NaN, so that it cannot pass for an answer; deterministic mode comes along."""
    served = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    if HAS_GPU or not getattr(served, "is_kernel", False):  # on a GPU this mode asks cuBLAS for more than these tests
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan().item()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
