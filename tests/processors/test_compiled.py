"""torch.compile with our processors: as many graphs as the model has by itself, whole and block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers_models as tiny  # noqa: E402
import sweep  # noqa: E402
from torch._dynamo.testing import CompileCounter  # noqa: E402

import ffpa_hf  # noqa: E402
from ffpa_hf import FFPAAttnProcessor  # noqa: E402

slow = pytest.mark.slow
TOLERANCE = 1e-5


def resized(name: str, inputs: dict[str, Any], size: int) -> dict[str, Any]:
    """The same kind of inputs for another picture: `size` tokens or pixels a side."""
    if name == "flux":
        tokens = {"hidden_states": torch.randn(2, size * size, 4), "img_ids": torch.randn(size * size, 3)}
    elif name == "qwen_image":
        tokens = {"hidden_states": torch.randn(2, size * size, 16), "img_shapes": [[(1, size, size)]] * 2}
    elif name == "wan":
        tokens = {"hidden_states": torch.randn(1, 4, 2, 2 * size, 2 * size)}
    else:
        tokens = {"sample": torch.randn(*inputs["sample"].shape[:2], 8 * size, 8 * size)}
    return {**inputs, **tokens}


def graphs_of(name: str, how: str, blocks: bool, sizes: tuple[int, ...]) -> tuple[int, list[torch.Tensor]]:
    """How many graphs a model takes for pictures of these sizes, and its outputs."""
    model, inputs = tiny.make(name)
    if how == "processor":
        model.set_attn_processor(FFPAAttnProcessor())
    elif how == "enable":
        ffpa_hf.enable(model)
    torch._dynamo.reset()
    counter = CompileCounter()
    if blocks:
        model.compile_repeated_blocks(backend=counter, fullgraph=True)
        called: Any = model
    else:
        called = torch.compile(model, backend=counter, fullgraph=True)
    torch.manual_seed(2)
    pictures = [resized(name, inputs, size) for size in sizes]
    outputs = []
    with torch.no_grad():
        for picture in pictures:
            outputs.append(torch.cat([t.flatten() for t in sweep._tensors(called(**picture, return_dict=False))]))
    return counter.frame_count, outputs


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("flux", "processor"),
        pytest.param("wan", "enable", marks=slow),
        pytest.param("qwen_image", "enable", marks=slow),
        pytest.param("unet_sdxl", "processor", marks=slow),
        pytest.param("vae_kl", "enable", marks=slow),
    ],
)
def test_a_whole_model_takes_no_more_graphs_than_by_itself(name, how):
    """Three sizes: the first graph, one for any size, and no third (the autoencoder takes one per size by itself)."""
    sizes, most = (4, 6, 8), 3 if name == "vae_kl" else 2
    default, expected = graphs_of(name, "default", False, sizes)
    ours, result = graphs_of(name, how, False, sizes)
    assert ours == default <= most
    assert all((a - b).abs().max() <= TOLERANCE for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen_image", "processor"),
        pytest.param("flux", "enable", marks=slow),
        pytest.param("wan", "enable", marks=slow),
        pytest.param("unet_sdxl", "enable", marks=slow),
    ],
)
def test_repeated_blocks_take_no_more_graphs_than_by_themselves(name, how):
    default, expected = graphs_of(name, "default", True, (4, 6))
    ours, result = graphs_of(name, how, True, (4, 6))
    assert ours == default > 0
    assert all((a - b).abs().max() <= TOLERANCE for a, b in zip(result, expected, strict=True))


def test_an_autoencoder_has_no_repeated_blocks_with_or_without_us():
    model, _ = tiny.make("vae_kl")
    with pytest.raises(ValueError, match="_repeated_blocks"):
        model.compile_repeated_blocks(fullgraph=True)
    ffpa_hf.enable(model)
    with pytest.raises(ValueError, match="_repeated_blocks"):
        model.compile_repeated_blocks(fullgraph=True)
