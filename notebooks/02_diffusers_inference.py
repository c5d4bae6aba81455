# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Inference with diffusers
#
# The attention of a Stable Diffusion or FLUX autoencoder is one head, 512 wide: PyTorch has no fast kernel for it. This
# notebook puts a photograph through such an autoencoder and a small pipeline through a few steps, with diffusers' own
# processors and with `ffpa_hf`, and shows where the pictures differ. Weights are random and nothing is downloaded; with
# your own pipeline the calls are the same.

# %%
import time
import warnings

warnings.filterwarnings("ignore", message="IProgress")

import diffusers
import matplotlib.pyplot as plt
import torch
import transformers
from matplotlib.colors import LogNorm
from matplotlib_inline.backend_inline import set_matplotlib_formats

import ffpa_hf
from ffpa_hf.call import AttentionCall
from ffpa_hf.demo.photo import build_autoencoder, load_photograph
from ffpa_hf.dispatch import Route, plan

set_matplotlib_formats("jpeg", pil_kwargs={"quality": 85})  # noise is large as PNG
for library in (diffusers, transformers):
    library.utils.logging.set_verbosity_error()
on_gpu = torch.cuda.is_available()
device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
print(f"ffpa_hf {ffpa_hf.__version__}, torch {torch.__version__}, diffusers {diffusers.__version__}")
print(torch.cuda.get_device_name() if on_gpu else "CPU: no kernels, SDPA serves every call")

# %% [markdown]
# ## An autoencoder
#
# On a GPU it has full size (512 channels in the middle) and the photograph 1024 x 1024 pixels; on a CPU both are
# smaller.

# %%
channels = (128, 256, 512, 512) if on_gpu else (32, 64, 128, 128)
vae = build_autoencoder(channels, seed=0).to(device, dtype)
photograph = load_photograph(1024 if on_gpu else 192).to(device, dtype)


@torch.no_grad()
def through(vae):
    """The photograph, encoded and decoded: [H, W, 3] in float32, and seconds."""
    begin = time.perf_counter()
    picture = vae.decode(vae.encode(photograph).latent_dist.mode()).sample
    if on_gpu:
        torch.cuda.synchronize()
    return picture.float().cpu()[0].permute(1, 2, 0), time.perf_counter() - begin


def bright(picture):
    """Within 0 and 1, for showing what random weights decode to."""
    low, high = picture.quantile(0.01), picture.quantile(0.99)
    return ((picture - low) / (high - low)).clamp(0, 1)


def distance(picture, first):
    return ((picture - first).norm() / first.norm()).item()


through(vae)  # warm
default, default_seconds = through(vae)
vae.set_attn_processor(ffpa_hf.FFPAAttnProcessor())
through(vae)
ours, our_seconds = through(vae)
if on_gpu:
    print(f"default {default_seconds * 1e3:.0f} ms, ffpa_hf {our_seconds * 1e3:.0f} ms, the whole autoencoder")
print(ffpa_hf.report(vae))

# %% [markdown]
# ## SDXL's autoencoder: float32
#
# SDXL decodes in float32, which kernels do not take. Two ways out: `vae_attention_dtype=torch.bfloat16` computes the
# attention, and nothing else, in bfloat16; `vae.to(torch.bfloat16)` all of it. What each costs in the picture:

# %%
ffpa_hf.disable(vae)
if on_gpu:
    vae = vae.float()
photograph = photograph.float()
exact, _ = through(vae)
with ffpa_hf.enabled(vae):
    plain, _ = through(vae)
with ffpa_hf.enabled(vae, vae_attention_dtype=torch.bfloat16):
    lowered, _ = through(vae)
    print(ffpa_hf.report(vae))
photograph = photograph.bfloat16()
everything, _ = through(vae.bfloat16())
print(f"ffpa_hf in float32: distance {distance(plain, exact):.1e} (the same SDPA serves it)")

fig, axes = plt.subplots(2, 3, figsize=(9, 5.2), layout="constrained")
pictures = {"float32": exact, "attention in bfloat16": lowered, "all in bfloat16": everything}
scale = (everything - exact).abs().mean(-1).quantile(0.999).item()
for column, (title, picture) in enumerate(pictures.items()):
    axes[0, column].imshow(bright(picture))
    axes[0, column].set(title=title)
    if column:
        gap = (picture - exact).abs().mean(-1).clamp(min=scale * 1e-4)
        drawn = axes[1, column].imshow(gap, cmap="magma", norm=LogNorm(scale * 1e-4, scale))
        axes[1, column].set(title=f"distance {distance(picture, exact):.1e}")
axes[1, 0].imshow(load_photograph(256)[0].permute(1, 2, 0) / 2 + 0.5)
axes[1, 0].set(title="the photograph")
for ax in axes.flat:
    ax.set(xticks=[], yticks=[])
fig.colorbar(drawn, ax=axes[1], shrink=0.8, label="distance from float32")
plt.show()

# %% [markdown]
# ## A pipeline
#
# `ffpa_hf.enable(pipe)` reaches the UNet or transformer, ControlNets, text encoders and the autoencoder, and keeps
# what it replaces. A small Stable Diffusion with random weights:

# %%
torch.manual_seed(0)
unet = diffusers.UNet2DConditionModel(
    sample_size=16,
    block_out_channels=(64, 128),
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=64,
    attention_head_dim=2,
)
pipe = diffusers.StableDiffusionPipeline(
    vae=build_autoencoder((32, 64, 64, 64), seed=1),
    text_encoder=None,
    tokenizer=None,
    unet=unet,
    scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
    safety_checker=None,
    feature_extractor=None,
    requires_safety_checker=False,
).to(device)
pipe.set_progress_bar_config(disable=True)
words = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(2)).to(device)


@torch.no_grad()
def draw():
    """One picture [H, W, 3] in eight steps, always from the same noise."""
    return pipe(
        prompt_embeds=words[:1],
        negative_prompt_embeds=words[1:],
        num_inference_steps=8,
        generator=torch.Generator().manual_seed(3),
        height=128,
        width=128,
        output_type="pt",
    ).images[0].permute(1, 2, 0).float().cpu()  # fmt: skip


pictures = {"diffusers": draw()}
own = dict(pipe.unet.attn_processors)
ffpa_hf.enable(pipe)
pictures["enable(pipe)"] = draw()
print(ffpa_hf.report(pipe))

# %% [markdown]
# Each row is one attention module: how often it was called, with what, and who served it. The same with query, key and
# value projected by one matrix product each (`fuse_qkv=True`), undone by `disable`:

# %%
ffpa_hf.disable(pipe)
with ffpa_hf.enabled(pipe, fuse_qkv=True):
    fused = [name for name, module in pipe.unet.named_modules() if getattr(module, "fused_projections", False)]
    pictures["fuse_qkv=True"] = draw()
print(f"{len(fused)} attention modules were fused, for instance {fused[0]}")
back = pipe.unet.attn_processors
print("the very processors that were there are back:", all(back[name] is own[name] for name in own))

fig, axes = plt.subplots(1, 3, figsize=(8, 2.9), layout="constrained")
for ax, (title, picture) in zip(axes, pictures.items(), strict=True):
    ax.imshow(bright(picture))
    ax.set(title=f"{title}\ndistance {distance(picture, pictures['diffusers']):.1e}", xticks=[], yticks=[])
plt.show()

# %% [markdown]
# Where the same SDPA serves both, as on a CPU, the distance is zero or a few roundings; on a GPU it is that of two
# kernels in one dtype, amplified by eight steps.
#
# ## Before any call
#
# What stands on a module can be asked without running it:

# %%
transformer = diffusers.FluxTransformer2DModel(
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=64,
    num_attention_heads=2,
    joint_attention_dim=64,
    pooled_projection_dim=32,
    axes_dims_rope=(16, 24, 24),
    in_channels=16,
).to(device)
transformer.set_attn_processor(ffpa_hf.FFPAAttnProcessor())
for site in ffpa_hf.report(transformer).uncalled:
    print(f"{site.module_name}: {site.reason}")

# %% [markdown]
# "native" means that QK-norm, rotary embedding and the joint text-and-image buffer are ours as well, not only the
# attention between them; `docs/diffusers.md` lists which models are served how.
#
# ## FP8
#
# `precision="fp8"` asks for the quantised CUDA kernels in the denoising models. What the planner says to a call of
# FLUX's size on an H200:

# %%
flux = AttentionCall(1, 24, 24, 4608, 4608, 128, 128, torch.bfloat16, capability=(9, 0), device_name="NVIDIA H200")
print(plan(flux, Route(backend="cuda-fp8", strict=True)))
