"""Random calls: legal ones with their truth, illegal ones with the argument that their error must name.

Strategies of hypothesis, for the test suite and for `scripts/random_calls.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from oracle import DEVICE, compare
from torch import Tensor

from ffpa_hf import RowIntervals


def layout(tensor: Tensor, kind: str) -> Tensor:
    """The same numbers lying differently in memory; the result is a leaf."""
    if kind == "transposed":
        tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    elif kind == "padded":
        wide = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 3)
        wide[..., 1:-2] = tensor
        tensor = wide[..., 1:-2]
    elif kind == "expanded" and tensor.numel():
        tensor = tensor[:, :1].expand_as(tensor)
    elif kind == "strided" and tensor.numel():
        tensor = torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.detach()


@st.composite
def legal_calls(
    draw: Any, dtypes: tuple[torch.dtype, ...], widths: tuple[int, ...], longest: int = 13, few: bool = False
) -> tuple[dict, dict, dict]:
    """(tensors by name, keywords of the call, keywords of the truth); few: at most four heads in all, for the
    interpreter, which works them off one by one."""
    dtype = draw(st.sampled_from(dtypes))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    most = draw(st.sampled_from([(2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 3)])) if few else (2, 2, 3)
    batch, kv_heads, group = (draw(st.integers(1, size)) for size in most)
    rows, keys, width = draw(st.integers(0, longest)), draw(st.integers(0, longest)), draw(st.sampled_from(widths))
    heads = kv_heads * group

    def randn(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(of)

    places = st.sampled_from(["plain", "transposed", "padded", "strided", "expanded"])
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


def check(function: Any, case: tuple[dict, dict, dict], *, forward_only: bool = False) -> None:
    """`function` gives attention, and its gradients, for a legal call."""
    tensors, call, expected = case

    def run(bias: Tensor | None = None, **given: Tensor) -> Any:
        mask = call.get("attn_mask")
        if bias is not None:
            mask = bias if mask is None else RowIntervals(mask.start, mask.end, mask.key_mask, bias)
        return function(**given, **(call | {"attn_mask": mask}))

    compare(run, tensors, expected, needs=() if forward_only else None)


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
