"""Native processors on a GPU: the kernel for QK-norm and rotary embedding inside diffusers' own blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.models.transformers import transformer_flux, transformer_wan  # noqa: E402

from ffpa_hf import FFPAAttnProcessor, joint  # noqa: E402
from ffpa_hf.kernels.reference import join_streams  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.fixture
def launches(monkeypatch) -> list[Any]:
    from ffpa_hf.kernels.triton import qkv_kernels

    calls: list[Any] = []
    run = qkv_kernels.join_streams
    monkeypatch.setattr(qkv_kernels, "join_streams", lambda *values: calls.append(values) or run(*values))
    return calls


def rotary(length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(length, width // 2, device=DEVICE) * 6.28
    return angle.cos().repeat_interleave(2, -1), angle.sin().repeat_interleave(2, -1)


def flux(batch: int) -> tuple[Any, dict[str, Any]]:
    attn = transformer_flux.FluxAttention(
        512, heads=4, dim_head=128, added_kv_proj_dim=512, out_dim=512, context_pre_only=False, bias=True, eps=1e-6
    )
    tokens = {"hidden_states": (batch, 700, 512), "encoder_hidden_states": (batch, 77, 512)}
    inputs: dict[str, Any] = {name: torch.randn(*shape, device=DEVICE) for name, shape in tokens.items()}
    return attn, {**inputs, "image_rotary_emb": rotary(777, 128)}


def wan(batch: int) -> tuple[Any, dict[str, Any]]:
    attn = transformer_wan.WanAttention(480, heads=5, dim_head=96, processor=transformer_wan.WanAttnProcessor())
    tables = tuple(table[None, :, None] for table in rotary(600, 96))
    return attn, {"hidden_states": torch.randn(batch, 600, 480, device=DEVICE), "rotary_emb": tables}


def half(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: value.to(dtype) if torch.is_tensor(value) else value for name, value in inputs.items()}


def flat(out: Any) -> torch.Tensor:
    return torch.cat([part.flatten() for part in out]) if isinstance(out, tuple) else out.flatten()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [flux, wan])
def test_no_further_from_the_truth_than_the_default(make, fused, batch, launches):
    attn, inputs = make(batch)
    attn = attn.to(DEVICE)
    with torch.no_grad():
        truth = flat(copy.deepcopy(attn).double()(**half(inputs, torch.float64)))
        attn.bfloat16()
        if fused:
            attn.fuse_projections()
        inputs = half(inputs, torch.bfloat16)
        default = (flat(attn(**inputs)).double() - truth).norm()
        attn.set_processor(FFPAAttnProcessor())
        ours = (flat(attn(**inputs)).double() - truth).norm()
    assert len(launches) == 2 and ours <= 1.1 * default


def test_a_graph_replays_with_new_inputs_and_streams_are_kept(launches):
    attn, inputs = flux(1)
    attn, inputs = attn.to(DEVICE).bfloat16(), half(inputs, torch.bfloat16)
    attn.set_processor(FFPAAttnProcessor(backend="sdpa"))
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            flat(attn(**inputs))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flat(attn(**inputs))
        inputs["hidden_states"].copy_(torch.randn_like(inputs["hidden_states"]))
        graph.replay()
        assert torch.equal(out, flat(attn(**inputs)))


def test_offsets_beyond_two_to_the_31():
    base = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=DEVICE)
    x = base.as_strided((2, 2, 4, 128), (2**31, 512, 128, 1))
    x.normal_()
    exact = join_streams([x.contiguous()], [None], [1e-6], [None], [None])
    assert (joint.join([joint.Stream(x, 1e-6)]) - exact).abs().max() <= 2**-6


def test_a_gradient_goes_through_torch(launches):
    attn, inputs = wan(1)
    attn = attn.to(DEVICE).bfloat16()
    attn.set_processor(FFPAAttnProcessor())
    attn(**half(inputs, torch.bfloat16)).square().sum().backward()
    assert not launches
    assert torch.isfinite(attn.norm_q.weight.grad).all() and attn.norm_q.weight.grad.abs().max() > 0


def test_compiled_whole(launches):
    attn, inputs = flux(1)
    attn, inputs = attn.to(DEVICE).bfloat16(), half(inputs, torch.bfloat16)
    attn.set_processor(FFPAAttnProcessor())
    with torch.no_grad():
        expected = flat(attn(**inputs))
        launches.clear()
        attn.compile(fullgraph=True)
        result = flat(attn(**inputs))
    assert launches and (result - expected).float().norm() <= 0.02 * expected.float().norm()
