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
# # Quick start
#
# `ffpa_hf` is exact attention for head dims 64 to 1024, where PyTorch's fast kernels end at 256. One function, one name
# for transformers, one processor for diffusers. Everything here runs offline, on a GPU or a CPU; on a CPU there are no
# kernels, the calls go to PyTorch's own attention (SDPA), and `ffpa_hf` says so.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress")  # progress bars are plain text here

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Gemma4TextConfig

import ffpa_hf
from ffpa_hf import RowIntervals

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"ffpa_hf {ffpa_hf.__version__}, torch {torch.__version__}")
print(torch.cuda.get_device_name() if device == "cuda" else "CPU")

# %% [markdown]
# ## One function
#
# The arguments are those of `F.scaled_dot_product_attention`; shapes are `[B, H, N, D]`.

# %%
length = 4096 if device == "cuda" else 768
torch.manual_seed(0)
query, key, value = (torch.randn(1, 4, length, 512, device=device, dtype=torch.bfloat16) for _ in range(3))
out = ffpa_hf.ffpa_attn_func(query, key, value, is_causal=True)
print(out.shape, out.dtype, out.device.type)

# %% [markdown]
# `explain` takes the same arguments, runs nothing, and says which kernel would serve the call and why the others would
# not.

# %%
print(ffpa_hf.explain(query, key, value, is_causal=True))

# %% [markdown]
# ## How far from exact
#
# Both are judged against float64, over head dims: the distance is that of the inputs' dtype, not of the method. (Where
# both points coincide, the same code served both: on a CPU, and up to head dim 256 on a GPU without a measured table.)


# %%
def distance(function, head_dim, dtype):
    """Relative distance of a causal call from the float64 result of the same inputs."""
    torch.manual_seed(head_dim)
    inputs = [torch.randn(1, 2, 600, head_dim, device=device, dtype=dtype) for _ in range(3)]
    exact = F.scaled_dot_product_attention(*(x.double() for x in inputs), is_causal=True)
    return ((function(*inputs, is_causal=True).double() - exact).norm() / exact.norm()).item()


head_dims = [64, 128, 256, 320, 512, 768, 1024]
fig, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for dtype, color in ((torch.bfloat16, "tab:blue"), (torch.float16, "tab:orange"), (torch.float32, "tab:green")):
    for name, function, style in (
        ("SDPA", F.scaled_dot_product_attention, "s"),
        ("ffpa_hf", ffpa_hf.ffpa_attn_func, "x"),
    ):
        errors = [distance(function, head_dim, dtype) for head_dim in head_dims]
        label = f"{name}, {str(dtype).removeprefix('torch.')}"
        axes.plot(head_dims, errors, style, color=color, label=label, fillstyle="none", linestyle=":")
axes.set(yscale="log", xlabel="head dim", ylabel="relative distance from float64", xticks=head_dims)
axes.legend(frameon=False, ncols=3, fontsize=8)
axes.set_ylim(top=axes.get_ylim()[1] * 20)
plt.show()

# %% [markdown]
# ## Masks that cost two numbers per row
#
# A window, padding or packed documents need no N x N tensor. More in `04_masks`.

# %%
window = RowIntervals.sliding_window(length, length, 128, device=device)
out = ffpa_hf.ffpa_attn_func(query, key, value, attn_mask=window)
dense = F.scaled_dot_product_attention(query, key, value, attn_mask=window.dense(length))
print(f"same as with the dense mask to {(out - dense).abs().max().item():.2g}")
print(f"the intervals take {8 * length} bytes, the dense mask {length * length}")

# %% [markdown]
# ## transformers
#
# A small Gemma 4 with random weights; with a name from the Hub it is `from_pretrained(name,
# attn_implementation="ffpa")`.

# %%
config = Gemma4TextConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    sliding_window=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=256,
    global_head_dim=512,
    num_kv_shared_layers=0,
    hidden_size_per_layer_input=0,
    pad_token_id=0,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="ffpa").to(device).eval()
prompt = torch.randint(1, 256, (2, 300), device=device)
padding = torch.ones_like(prompt)
padding[0, :100] = 0  # left padding
tokens = {}
for name in ("eager", "ffpa"):
    model.set_attn_implementation(name)
    tokens[name] = model.generate(prompt, attention_mask=padding, max_new_tokens=8, do_sample=False)[:, -8:]
print("the same tokens as eager's:", torch.equal(tokens["eager"], tokens["ffpa"]))

# %% [markdown]
# `report` counts who served what, per module, with its reason.

# %%
print(ffpa_hf.report(model))

# %% [markdown]
# ## diffusers
#
# `enable` reaches every model of a pipeline and gives everything back with `disable`. Here one autoencoder: its
# attention has one head as wide as its channels. `02_diffusers_inference` has a whole pipeline.

# %%
from diffusers import AutoencoderKL

torch.manual_seed(0)
vae = AutoencoderKL(
    block_out_channels=(32, 64, 128),
    down_block_types=("DownEncoderBlock2D",) * 3,
    up_block_types=("UpDecoderBlock2D",) * 3,
    norm_num_groups=8,
)
vae = vae.to(device).eval()
latents = torch.randn(1, 4, 32, 32, device=device)
with torch.no_grad():
    before = vae.decode(latents).sample
    with ffpa_hf.enabled(vae):
        after = vae.decode(latents).sample
        print(ffpa_hf.report(vae))
print(f"largest difference {(before - after).abs().max().item():.2g}, of values up to {before.abs().max().item():.2g}")

# %% [markdown]
# ## Asking for a backend
#
# Without a wish the planner chooses, silently. A name is a request: it is served, or SDPA stands in with one warning,
# or an error names a backend that would take the call.

# %%
small = [x[:, :, :100] for x in (query, key, value)]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ffpa_hf.ffpa_attn_func(*small, backend="triton")
print("warning:", caught[0].message)
try:
    ffpa_hf.ffpa_attn_func(*small, backend="cuda", softcap=30.0)
except NotImplementedError as error:
    print("error:  ", error)
