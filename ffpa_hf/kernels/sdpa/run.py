"""How the SDPA backend computes: what is handed to F.sdpa, and the chunked composite.

Must not know of other backends. Differentiable throughout; `backward` recomputes for kernels that saved no graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ffpa_hf.kernels.common import AttentionInputs
from ffpa_hf.kernels.reference import attention

#: Head dim up to which F.sdpa has a fused kernel that takes fewer key heads than query heads.
_FUSED_GQA_HEAD_DIM = 256
#: A bias below which no score is seen any more in float32, and which stays finite times log2(e).
_ABSORBING = -1e30
#: Score elements that the composite holds at once (fp32: 256 MiB).
_CHUNK_ELEMENTS = 1 << 26


def forward(inputs: AttentionInputs, *, composite: bool = False) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None). `composite` asks for the route that knows log-sum-exp, softcap, sinks and fp32 biases."""
    if 0 in inputs.query.shape[:3] or inputs.key.shape[2] == 0:
        return _nothing_to_attend(inputs)
    if composite:
        return _composite(inputs)
    return _fused(inputs), None


def _fused(inputs: AttentionInputs) -> Tensor:
    query, key, value = inputs.query, inputs.key, inputs.value
    mask = dense_mask(inputs)
    if mask is not None:
        # Mem-efficient attention answers wrongly for expanded keys with a mask at wide head dims.
        key, value = _materialised(key), _materialised(value)
    grouped = inputs.group > 1
    if grouped and (mask is not None or query.shape[-1] > _FUSED_GQA_HEAD_DIM or query.device.type != "cuda"):
        # No fused kernel takes the group here; the one that does materialises all scores.
        key = key.repeat_interleave(inputs.group, dim=1)
        value = value.repeat_interleave(inputs.group, dim=1)
        grouped = False
    kwargs = {"enable_gqa": True} if grouped else {}
    scale = inputs.scale
    if scale <= 0.0:  # flash and cuDNN answer NaN
        query, scale = (query * 0.0, 1.0) if scale == 0.0 else (-query, -scale)
    if query.device.type == "cuda":
        query, key, value = _readable(query), _readable(key), _readable(value)
        if mask is not None:
            mask = _fused_mask(mask, query.dtype, key.shape[-2])
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=inputs.dropout_p,
        is_causal=inputs.is_causal,
        scale=scale,
        **kwargs,
    )
    if out.requires_grad and query.device.type == "cuda" and not torch.compiler.is_compiling():
        # cuDNN's backward reads the incoming gradient as if it lay in memory as the output does.
        out.register_hook(functools.partial(_laid_out, out.shape, out.stride()))
    return out


def _laid_out(shape: torch.Size, strides: tuple[int, ...], gradient: Tensor) -> Tensor:
    """`gradient`, or a copy where it lies otherwise than `strides` say or starts off a 16-byte border."""
    if gradient.stride() == strides and _starts_on_border(gradient):
        return gradient
    return gradient.new_empty_strided(shape, strides).copy_(gradient)


def _starts_on_border(tensor: Tensor) -> bool:
    """Whether the address is a multiple of 16; taken for granted where there is none (in a graph, under vmap)."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return tensor.data_ptr() % 16 == 0


def _readable(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy where an address or a stride is off a 16-byte border.

    torch's fused CUDA kernels fault on some of these, refuse others, and answer wrongly on others still.
    """
    unit = 16 // tensor.element_size()
    helps = tensor.shape[-1] % unit == 0  # else a copy is no better, and torch pads the rows itself
    off = helps and any(
        size > 1 and stride % unit != 0 for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )
    if not off and _starts_on_border(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _fused_mask(mask: Tensor, dtype: torch.dtype, kv_len: int) -> Tensor:
    """A mask in the one form that every fused CUDA kernel of torch answers rightly (seen on an H200, torch 2.11).

    cuDNN lets rows without keys see something under a bool mask, not under minus infinities. Mem-efficient and cuDNN
    multiply by log2(e), which turns finite minima into minus infinity: -1e30 stays finite and absorbs any score too.
    """
    if mask.shape[-1] != kv_len:  # mem-efficient takes no mask that is broadcast along the keys
        mask = mask.expand(*mask.shape[:-1], kv_len)
    if mask.dtype == torch.bool:
        return torch.where(mask, 0.0, float("-inf")).to(dtype).contiguous()
    if mask.dtype != torch.float16:  # its minimum is no danger
        mask = torch.where(mask == float("-inf"), mask, mask.clamp(min=_ABSORBING))
    mask = mask.contiguous()
    return mask if _starts_on_border(mask) else mask.clone()


def _needs_grad(inputs: AttentionInputs) -> bool:
    tensors = (inputs.query, inputs.key, inputs.value, inputs.bias, inputs.sinks)
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def dense_mask(inputs: AttentionInputs) -> Tensor | None:
    """The one mask tensor that F.sdpa takes, broadcastable to `[B, Hq, Nq, Nkv]`; None where there is none."""
    keep = inputs.mask
    if inputs.row_start is not None and inputs.row_end is not None:
        position = torch.arange(inputs.key.shape[-2], dtype=torch.int32, device=inputs.query.device)
        inside = ((position >= inputs.row_start[..., None]) & (position < inputs.row_end[..., None]))[:, None]
        keep = inside if keep is None else keep & inside
    if inputs.key_mask is not None:
        present = inputs.key_mask[:, None, None, :]
        keep = present if keep is None else keep & present
    if inputs.bias is None:
        return keep
    if keep is None:
        return inputs.bias
    return torch.where(keep, inputs.bias, float("-inf"))


def _materialised(tensor: Tensor) -> Tensor:
    expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.contiguous() if expanded else tensor


def _composite(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, heads, q_len, _ = query.shape
    rows_per_chunk = q_len
    if not torch.compiler.is_compiling():
        rows_per_chunk = max(1, _CHUNK_ELEMENTS // max(1, batch * heads * key.shape[-2]))
    if rows_per_chunk >= q_len:
        out, lse = _composite_rows(inputs, key, value, 0, q_len)
        return out, lse
    needs_grad = _needs_grad(inputs)
    pieces = []
    for begin in range(0, q_len, rows_per_chunk):
        end = min(q_len, begin + rows_per_chunk)
        if needs_grad:  # one chunk's scores live at a time, in backward too
            pieces.append(checkpoint(_composite_rows, inputs, key, value, begin, end, use_reentrant=False))
        else:
            pieces.append(_composite_rows(inputs, key, value, begin, end))
    return torch.cat([out for out, _ in pieces], dim=2), torch.cat([lse for _, lse in pieces], dim=2)


def _composite_rows(inputs: AttentionInputs, key: Tensor, value: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    compute = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32

    def rows(tensor: Tensor | None, dim: int) -> Tensor | None:
        if tensor is None or tensor.shape[dim] == 1:
            return tensor
        return tensor.narrow(dim, begin, end - begin)

    query = rows(inputs.query, 2)
    assert query is not None
    keep = None
    if inputs.dropout_p > 0:
        shape = (*query.shape[:3], key.shape[2])
        keep = torch.rand(shape, device=query.device, dtype=torch.float32) >= inputs.dropout_p
    row_start, row_end = inputs.row_start, inputs.row_end
    out, lse = attention(
        query.to(compute),
        key.to(compute),
        value.to(compute),
        scale=inputs.scale,
        is_causal=inputs.is_causal,
        mask=rows(inputs.mask, 2),
        bias=rows(inputs.bias, 2),
        row_start=None if row_start is None else row_start[:, begin:end],
        row_end=None if row_end is None else row_end[:, begin:end],
        key_mask=inputs.key_mask,
        sinks=inputs.sinks,
        softcap=inputs.softcap,
        keep=keep,
        dropout_p=inputs.dropout_p,
        first_row=begin,
    )
    return out.to(inputs.query.dtype), lse.to(torch.float32)


def _nothing_to_attend(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Zeros (and the sink, or -inf) for calls without rows or without keys, still connected to the inputs' graph."""
    query, key, value, sinks = inputs.query, inputs.key, inputs.value, inputs.sinks
    link = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()
    if inputs.bias is not None:
        link = link + inputs.bias[..., :0].sum().to(link.dtype)
    if sinks is not None:
        link = link + sinks[:0].sum().to(link.dtype)
    out = query.new_zeros(*query.shape[:-1], value.shape[-1]) + link
    lse = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
    if sinks is not None:
        lse = sinks.to(torch.float32)[None, :, None].expand(lse.shape).clone()
    return out, lse + link.to(torch.float32)


def backward(
    inputs: AttentionInputs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients by running forward again with a graph: (dq, dk, dv, dbias, dsinks), None where not needed.

    Serves kernels that were asked for an SDPA backward. Dropout is refused by the planner: torch draws other numbers.
    """
    names = ("query", "key", "value", "bias", "sinks")
    leaves = {
        name: getattr(inputs, name).detach().requires_grad_(True)
        for name, needed in zip(names, needs, strict=True)
        if needed
    }
    fields = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__} | leaves
    composite = grad_lse is not None or inputs.softcap is not None or inputs.sinks is not None
    composite = composite or inputs.bias is not None
    with torch.enable_grad():
        out, lse = forward(AttentionInputs(**fields), composite=composite)
        outputs, grads = [out], [grad_out]
        if grad_lse is not None and lse is not None:
            outputs.append(lse)
            grads.append(grad_lse.to(lse.dtype))
        found = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
    by_name = dict(zip(leaves, found, strict=True))
    return tuple(by_name.get(name) for name in names)
