"""Providers of 8-bit attention: what they convert, and that nobody gets them unasked."""

from __future__ import annotations

import torch

from ffpa_hf.bench import providers


def test_codes_for_fa3_stand_for_the_tensor():
    x = (
        torch.randn(2, 9, 4, 64, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 5.0, 2.0, 0.0])[:, None]
    )
    codes, scale = providers._one_scale_per_head(x, 2)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape
    assert scale.shape == (2, 2) and scale.dtype == torch.float32
    back = codes.float() * scale.repeat_interleave(2, 1)[:, None, :, None]
    assert (back - x).norm() < 0.04 * x.norm() and torch.equal(back[:, :, 3], x[:, :, 3])


def test_8_bit_providers_are_timed_where_they_are_named(monkeypatch):
    monkeypatch.setattr(providers, "_found", lambda module: True)
    names = {provider.name for provider in providers.select(None, torch.device("cuda"))}
    assert "fa3" in names and not any("fp8" in name for name in names)
    chosen = providers.select(["ffpa_hf/cuda-fp8", "fa3-fp8"], torch.device("cuda"))
    assert [provider.name for provider in chosen] == ["fa3-fp8", "ffpa_hf/cuda-fp8"]
    assert all(provider.directions == ("fwd",) for provider in chosen)
