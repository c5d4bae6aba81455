"""A photograph through a full-size AutoencoderKL, with diffusers' own attention and with FFPAAttnProcessor.

The autoencoder has the architecture of the Stable Diffusion VAEs (83.7 M parameters, one 512-wide attention head in the
encoder and one in the decoder) and random weights, because the demo downloads nothing. Knows nothing of fine-tuning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ffpa_hf
from ffpa_hf.demo.evidence import Check, Site, SiteClock, every_call_counted, sites_of
from ffpa_hf.report import reset

#: fp32 against fp32 with the same SDPA underneath: only the memory order may change, so a few roundings (2**-23 each).
SAME_KERNEL_LIMIT = 1e-5
#: Half precision with another kernel: as far from fp32 as twice what the default processor is.
TIMES_DEFAULT_ERROR = 2.0


@dataclass(frozen=True)
class PhotoResult:
    """Pictures are fp32 [H, W, 3] on the CPU: `photograph` in -1..1, the decoded ones in the decoder's own units."""

    photograph: np.ndarray
    default: np.ndarray
    ffpa: np.ndarray
    size: int
    dtype: torch.dtype
    parameters: int
    default_seconds: float
    ffpa_seconds: float
    checks: list[Check]
    sites: list[Site]


def load_photograph(size: int) -> Tensor:
    """matplotlib's sample portrait of Grace Hopper, cropped square: fp32 [1, 3, size, size] in -1..1."""
    from matplotlib import cbook
    from PIL import Image

    with Image.open(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)) as opened:
        square = opened.convert("RGB").crop((0, 0, 512, 512)).resize((size, size), Image.Resampling.LANCZOS)
    pixels = torch.from_numpy(np.asarray(square, dtype=np.float32).copy())
    return pixels.permute(2, 0, 1).unsqueeze(0) / 127.5 - 1


def build_autoencoder(channels: tuple[int, ...] = (128, 256, 512, 512), seed: int = 0) -> Any:
    """AutoencoderKL of the Stable Diffusion family with random weights drawn from `seed`; fp32, in eval mode."""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=2,
        latent_channels=4,
    ).eval()


def run_photo(
    device: torch.device,
    *,
    size: int | None = None,
    channels: tuple[int, ...] = (128, 256, 512, 512),
    seed: int = 0,
    advance: Callable[[str], None] = lambda what: None,
) -> PhotoResult:
    """Encode and decode the photograph with the default processors and with one shared FFPAAttnProcessor.

    size: edge in pixels; None is 256 on a CPU (fp32) and 1024 on a GPU (bf16). advance is told what starts next, six
    times. Raises ImportError where diffusers, matplotlib or Pillow is missing.
    """
    on_cpu = device.type == "cpu"
    size = size or (256 if on_cpu else 1024)
    dtype = torch.float32 if on_cpu else torch.bfloat16

    advance("building the autoencoder")
    vae = build_autoencoder(channels, seed).to(device)
    vae = vae if on_cpu else vae.bfloat16()
    photograph = load_photograph(size).to(device, dtype)
    names = [name.removesuffix(".processor") for name in vae.attn_processors]
    modules = [(name, vae.get_submodule(name)) for name in names]
    own_processors = dict(vae.attn_processors)
    shared = ffpa_hf.FFPAAttnProcessor()

    def timed(what: str) -> tuple[Tensor, float, SiteClock]:
        advance(what)
        with SiteClock(modules, device) as clock:
            start = time.perf_counter()
            picture = _through(vae, photograph).float().cpu()
            return picture, time.perf_counter() - start, clock

    for turn in ("warming up", "timed"):  # in turns: the second pair is warm, and shares what else the machine does
        ffpa_hf.disable(vae)
        default, default_seconds, default_clock = timed(f"diffusers' processors, {turn}")
        reset()
        vae.set_attn_processor(shared)
        ours, ffpa_seconds, ffpa_clock = timed(f"FFPAAttnProcessor, {turn}")
    checks = [every_call_counted("VAE", vae, names, ffpa_clock)]
    sites = sites_of("VAE", vae, default_clock, ffpa_clock)

    ffpa_hf.disable(vae)
    restored = vae.attn_processors
    kept = sum(restored[name] is processor for name, processor in own_processors.items())
    checks.append(
        Check(
            name="VAE: ffpa_hf.disable gives back the very same processors",
            passed=kept == len(own_processors) == len(restored),
            measured=f"{kept} of {len(restored)}",
            allowed=f"{len(own_processors)} of {len(own_processors)}",
            why="switching off must leave no trace",
        )
    )

    advance("comparing")
    if on_cpu:
        error, limit = _relative(ours, default), SAME_KERNEL_LIMIT
        why = "both runs end in PyTorch's SDPA on a CPU, in fp32: nothing but the rounding of a few sums may differ"
        name = "VAE: decoded picture, ffpa_hf against default, largest difference / largest value"
    else:
        truth = _through(vae.float(), photograph.float()).float().cpu()
        error, own_error = _relative(ours, truth), _relative(default, truth)
        limit = TIMES_DEFAULT_ERROR * own_error
        why = f"twice the error of diffusers' own processor in {str(dtype).removeprefix('torch.')}, {own_error:.1e}"
        name = "VAE: decoded picture, ffpa_hf against fp32, largest difference / largest value"
    checks.append(Check(name, error <= limit, f"{error:.1e}", f"{limit:.1e}", why))
    return PhotoResult(
        photograph=_picture(photograph),
        default=_picture(default),
        ffpa=_picture(ours),
        size=size,
        dtype=dtype,
        parameters=sum(parameter.numel() for parameter in vae.parameters()),
        default_seconds=default_seconds,
        ffpa_seconds=ffpa_seconds,
        checks=checks,
        sites=sites,
    )


@torch.no_grad()
def _through(vae: Any, photograph: Tensor) -> Tensor:
    latents = vae.encode(photograph).latent_dist.mode()
    return vae.decode(latents).sample


def _relative(picture: Tensor, reference: Tensor) -> float:
    """Largest difference over largest value; NaN anywhere gives infinity, which passes no limit."""
    error = ((picture - reference).abs().max() / reference.abs().max()).item()
    return error if error == error else float("inf")


def _picture(image: Tensor) -> np.ndarray:
    return image[0].float().cpu().permute(1, 2, 0).numpy()
