"""Linear layers of torchao and bitsandbytes under our processors. `make test-quantised` installs both and runs this."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

import diffusers_models as tiny  # noqa: E402
import sweep  # noqa: E402

import ffpa_hf  # noqa: E402
from ffpa_hf import FFPAAttnProcessor  # noqa: E402

pytestmark = pytest.mark.quantised
TOLERANCE = 1e-5


def with_torchao(model: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def with_bitsandbytes(model: Any, kind: str = "Linear4bit", **more: Any) -> None:
    import bitsandbytes

    make = getattr(bitsandbytes.nn, kind)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and "att" in name:
            quantised = make(layer.in_features, layer.out_features, bias=layer.bias is not None, **more)
            quantised.load_state_dict(layer.state_dict(), strict=False)
            model.set_submodule(name, quantised.to("cpu"))  # in eval mode it would repack blocks of 64


QUANTISERS = {
    "torchao int8": with_torchao,
    "bitsandbytes 4 bits": lambda model: with_bitsandbytes(model, compute_dtype=torch.float32),
    "bitsandbytes 8 bits": lambda model: with_bitsandbytes(model, "Linear8bitLt", has_fp16_weights=False),
}


@pytest.mark.parametrize("quantiser", QUANTISERS)
@pytest.mark.parametrize("name", ["flux", "flux2", "qwen_image", "wan", "sd3", "hunyuan_video", "unet_sdxl", "vae_kl"])
def test_quantised_layers_are_called_as_layers(name, quantiser, monkeypatch):
    """Whoever reads their weights instead gets packed numbers."""
    model, inputs = tiny.make(name)
    plain = sweep.run(model, inputs)
    QUANTISERS[quantiser](model)
    keys = list(model.state_dict())
    expected = sweep.run(model, inputs)
    assert (expected - plain).abs().max() > 1e-4, "nothing was quantised"
    model.set_attn_processor(FFPAAttnProcessor())
    with tiny.counted(monkeypatch) as calls:
        assert (sweep.run(model, inputs) - expected).abs().max() <= TOLERANCE
    assert calls and list(model.state_dict()) == keys
    ffpa_hf.disable(model)
    assert torch.equal(sweep.run(model, inputs), expected)


@pytest.mark.parametrize("quantiser", QUANTISERS)
def test_quantised_projections_are_not_fused(quantiser):
    model, inputs = tiny.make("flux")
    QUANTISERS[quantiser](model)
    expected = sweep.run(model, inputs)
    with pytest.raises(ValueError, match="quantisation|stored as"):
        ffpa_hf.enable(model, fuse_qkv=True)
    ffpa_hf.enable(model)
    with pytest.raises(ValueError, match="quantisation|stored as"):
        model.fuse_qkv_projections()
    assert (sweep.run(model, inputs) - expected).abs().max() <= TOLERANCE
