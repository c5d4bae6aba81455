"""Random calls: legal ones equal attention in float64 with every gradient, illegal ones raise and name the argument.

Every day 300 legal ones go through a kernel (in the interpreter, where there is no GPU), 2,000 in the slow run;
`scripts/random_calls.py` runs any number on a GPU, in chunks that can be resumed.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from oracle import HAS_GPU, KERNELS, Served
from random_calls import WRONG, check, legal_calls

from ffpa_hf import ffpa_attn_func

DAILY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(legal_calls((torch.float32, torch.float16, torch.bfloat16, torch.float64), (8, 20, 64)))
@DAILY
def test_any_legal_call_is_attention(case):
    check(ffpa_attn_func, case)


def _in_a_kernel(backend: Served, part: int, cases: int) -> None:
    @seed(part)
    @settings(DAILY, max_examples=cases)
    @given(legal_calls((backend.dtype,), (64, 72), few=not HAS_GPU), st.integers(0, 2))
    def run(case, which):
        check(backend, case, forward_only=which > 0)

    run()


@pytest.mark.parametrize("part", range(10))  # in parts, so that several workers share the work
@pytest.mark.parametrize("backend", KERNELS)
def test_any_legal_call_is_attention_in_a_kernel(backend: Served, part: int):
    _in_a_kernel(backend, part, 30)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(100, 110))
@pytest.mark.parametrize("backend", KERNELS)
def test_many_legal_calls_are_attention_in_a_kernel(backend: Served, part: int):
    _in_a_kernel(backend, part, 200)


@given(
    st.sampled_from(sorted(WRONG)), st.sets(st.sampled_from(["scale", "softcap", "return_lse", "dropout_p"])), st.data()
)
@DAILY
def test_any_illegal_call_raises_and_names_the_argument(what, harmless, data):
    changes, named = WRONG[what]
    good = {"scale": 0.3, "softcap": 2.0, "return_lse": True, "dropout_p": 0.1}
    call = {
        "query": torch.randn(2, 4, 5, 16), "key": torch.randn(2, 2, 7, 16), "value": torch.randn(2, 2, 7, 16),
        "enable_gqa": True,
    }  # fmt: skip
    call |= {name: good[name] for name in harmless} | changes
    if "forward_backend" not in call and "backend" not in call and "backward_backend" not in call:
        call["backend"] = data.draw(st.sampled_from([None, "sdpa", "auto", "triton", "cuda", "cute"]))
    with pytest.raises((TypeError, ValueError)) as raised:
        ffpa_attn_func(**call)
    assert named in str(raised.value), str(raised.value)
    assert len(str(raised.value)) < 400
