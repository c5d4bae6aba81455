"""Random calls: legal ones equal attention in float64 with every gradient, illegal ones raise and name the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from oracle import DEVICE, HAS_GPU, KERNELS, Served, compare
from torch import Tensor

from ffpa_hf import RowIntervals, ffpa_attn_func

DAILY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def layout(tensor: Tensor, kind: str) -> Tensor:
    """The same numbers lying differently in memory; the result is a leaf."""
    if kind == "transposed":
        tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    elif kind == "padded":
        wide = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 3)
        wide[..., 1:-2] = tensor
        tensor = wide[..., 1:-2]
    elif kind == "strided" and tensor.numel():
        tensor = torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.detach()


@st.composite
def legal_calls(draw: Any, dtypes: tuple[torch.dtype, ...], widths: tuple[int, ...]) -> tuple[dict, dict, dict]:
    """(tensors by name, keywords of the call, keywords of the truth)."""
    dtype = draw(st.sampled_from(dtypes))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows, keys, width = draw(st.integers(0, 13)), draw(st.integers(0, 13)), draw(st.sampled_from(widths))
    heads = kv_heads * group

    def randn(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(of)

    places = st.sampled_from(["plain", "transposed", "padded", "strided"])
    tensors = {
        "query": layout(randn(batch, heads, rows, width), draw(places)),
        "key": layout(randn(batch, kv_heads, keys, width), draw(places)),
        "value": layout(randn(batch, kv_heads, keys, width), draw(places)),
    }
    call: dict[str, Any] = {"enable_gqa": group > 1}
    expected: dict[str, Any] = {}
    broadcast = [draw(st.booleans()) for _ in range(3)]
    shape = [1 if one else size for one, size in zip(broadcast, (batch, heads, rows), strict=True)]
    mask = draw(st.sampled_from(["none", "causal", "bool", "bias", "intervals", "intervals and bias"]))
    if mask == "causal":
        call["is_causal"] = True
        expected["keep"] = torch.ones(rows, keys, dtype=torch.bool, device=DEVICE).tril()
    elif mask == "bool":
        call["attn_mask"] = expected["keep"] = torch.rand(*shape, keys, device=DEVICE) > draw(
            st.sampled_from([0.2, 0.8])
        )
    elif mask == "bias":
        tensors["bias"] = randn(*shape, keys, of=draw(st.sampled_from([dtype, torch.float32])))
        if draw(st.booleans()):
            tensors["bias"].masked_fill_(torch.rand(*shape, keys, device=DEVICE) < 0.3, -torch.inf)
    elif mask.startswith("intervals"):
        items = draw(st.sampled_from([1, batch]))
        start = torch.randint(-2, keys + 1, (items, rows), dtype=torch.int32, device=DEVICE)
        end = start + torch.randint(-1, keys + 3, (items, rows), dtype=torch.int32, device=DEVICE)
        present = torch.rand(batch, keys, device=DEVICE) > 0.2 if draw(st.booleans()) else None
        call["attn_mask"] = RowIntervals(start, end, present)
        expected["keep"] = call["attn_mask"].dense(keys)
        if mask.endswith("bias"):
            tensors["bias"] = randn(*shape, keys)
    if draw(st.booleans()):
        call["scale"] = expected["scale"] = draw(st.sampled_from([0.0, -0.2, 0.05, 0.4]))
    if draw(st.booleans()):
        call["softcap"] = expected["softcap"] = draw(st.sampled_from([0.5, 3.0]))
    if draw(st.booleans()):
        tensors["sinks"] = randn(heads, of=draw(st.sampled_from([dtype, torch.float32])))
    call["return_lse"] = draw(st.booleans())
    return tensors, call, expected


def check(function: Any, case: tuple[dict, dict, dict]) -> None:
    tensors, call, expected = case

    def run(bias: Tensor | None = None, **given: Tensor) -> Any:
        mask = call.get("attn_mask")
        if bias is not None:
            mask = bias if mask is None else RowIntervals(mask.start, mask.end, mask.key_mask, bias)
        return function(**given, **(call | {"attn_mask": mask}))

    compare(run, tensors, expected)


@given(legal_calls((torch.float32, torch.float16, torch.bfloat16, torch.float64), (8, 20, 64)))
@DAILY
def test_any_legal_call_is_attention(case):
    check(ffpa_attn_func, case)


@pytest.mark.parametrize("part", range(5 if HAS_GPU else 1))  # in parts, so that several workers share the compiling
@pytest.mark.parametrize("backend", KERNELS)
def test_any_legal_call_is_attention_in_a_kernel(backend: Served, part: int):
    @seed(part)
    @settings(DAILY, max_examples=20 if HAS_GPU else 12)
    @given(legal_calls((backend.dtype,), (64, 72)))
    def run(case):
        check(backend, case)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
def test_many_legal_calls_are_attention_in_a_kernel(backend: Served):
    @settings(DAILY, max_examples=200 if HAS_GPU else 60, derandomize=False)
    @given(legal_calls((backend.dtype,), (64, 72)))
    def run(case):
        check(backend, case)

    run()


def _zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*shape, **options)


#: What is wrong -> (what changes, what the message must name). Of a call with B=2, Hq=4, Hkv=2, Nq=5, Nkv=7, D=16.
WRONG = {
    "key dtype": ({"key": _zeros(2, 2, 7, 16, dtype=torch.float64)}, "key"),
    "value dtype": ({"value": _zeros(2, 2, 7, 16, dtype=torch.float16)}, "value"),
    "key width": ({"key": _zeros(2, 2, 7, 8)}, "key"),
    "value length": ({"value": _zeros(2, 2, 6, 16)}, "value"),
    "key batch": ({"key": _zeros(3, 2, 7, 16)}, "key"),
    "key heads": ({"key": _zeros(2, 3, 7, 16), "value": _zeros(2, 3, 7, 16)}, "key"),
    "value rank": ({"value": _zeros(16)}, "value"),
    "no value": ({"value": None}, "value"),
    "whole numbers": ({name: _zeros(2, 4, 7, 16, dtype=torch.int32) for name in ("query", "key", "value")}, "query"),
    "key elsewhere": ({"key": _zeros(2, 2, 7, 16, device="meta")}, "key"),
    "mask shape": ({"attn_mask": _zeros(5, 6, dtype=torch.bool)}, "attn_mask"),
    "mask batch": ({"attn_mask": _zeros(3, 1, 5, 7)}, "attn_mask"),
    "mask heads": ({"attn_mask": _zeros(2, 2, 5, 7)}, "attn_mask"),
    "mask dtype": ({"attn_mask": _zeros(5, 7, dtype=torch.int64)}, "attn_mask"),
    "mask half": ({"attn_mask": _zeros(5, 7, dtype=torch.bfloat16)}, "attn_mask"),
    "mask elsewhere": ({"attn_mask": _zeros(5, 7, device="meta")}, "attn_mask"),
    "mask kind": ({"attn_mask": "causal"}, "attn_mask"),
    "mask and causal": ({"attn_mask": _zeros(5, 7), "is_causal": True}, "is_causal"),
    "interval rows": ({"attn_mask": RowIntervals.full(6, 7)}, "attn_mask"),
    "no grouping": ({"enable_gqa": False}, "enable_gqa"),
    "dropout": ({"dropout_p": 1.1}, "dropout_p"),
    "negative dropout": ({"dropout_p": -0.1}, "dropout_p"),
    "softcap": ({"softcap": -2.0}, "softcap"),
    "infinite softcap": ({"softcap": float("inf")}, "softcap"),
    "infinite scale": ({"scale": float("-inf")}, "scale"),
    "scale of no number": ({"scale": float("nan")}, "scale"),
    "sparse key": ({"key": _zeros(2, 2, 7, 16).to_sparse()}, "key"),
    "nested value": ({"value": torch.nested.nested_tensor([_zeros(2, 7, 16)] * 2)}, "value"),
    "eight bits": ({name: _zeros(2, 4, 7, 16).to(torch.float8_e4m3fn) for name in ("query", "key", "value")}, "query"),
    "sinks shape": ({"sinks": _zeros(2)}, "sinks"),
    "sinks dtype": ({"sinks": _zeros(4, dtype=torch.int32)}, "sinks"),
    "sinks elsewhere": ({"sinks": _zeros(4, device="meta")}, "sinks"),
    "backend": ({"backend": "cudnn"}, "backend"),
    "backend kind": ({"backend": torch}, "backend"),
    "forward backend": ({"forward_backend": "none"}, "forward_backend"),
    "backward backend": ({"backward_backend": "cuda"}, "backward_backend"),
    "pair": ({"forward_backend": "sdpa", "backward_backend": "triton"}, "backward_backend"),
}


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
        call["backend"] = data.draw(st.sampled_from([None, "sdpa", "auto"]))
    with pytest.raises((TypeError, ValueError)) as raised:
        ffpa_attn_func(**call)
    assert named in str(raised.value), str(raised.value)
    assert len(str(raised.value)) < 400
