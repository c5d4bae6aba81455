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
# # Masks
#
# A mask says which keys a query row may see. As a tensor it has N x N elements, and PyTorch's attention computes every
# one of them. Nearly every mask that Hugging Face models build lets a row see *one run of keys*: two numbers. That is
# `RowIntervals`; kernels skip what no row of a tile can see.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress")

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.colors import ListedColormap

import ffpa_hf
from ffpa_hf import RowIntervals, ffpa_attn_func

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"ffpa_hf {ffpa_hf.__version__}, torch {torch.__version__}, {device}")
shades = ListedColormap(["whitesmoke", "tab:blue"])


def draw(masks, length=None):
    """Rows of query against keys; blue may be seen."""
    fig, axes = plt.subplots(1, len(masks), figsize=(2.5 * len(masks), 2.8), layout="constrained", squeeze=False)
    for ax, (title, mask) in zip(axes[0], masks.items(), strict=True):
        dense = mask.dense(length or mask.q_len)[0, 0] if isinstance(mask, RowIntervals) else mask
        ax.imshow(dense.cpu(), cmap=shades, vmin=0, vmax=1, interpolation="nearest")
        ax.set(title=title, xticks=[], yticks=[], xlabel="keys")
    axes[0, 0].set_ylabel("queries")
    plt.show()


# %% [markdown]
# ## Builders

# %%
N = 48
ends = torch.tensor([0, 10, 28, 48], dtype=torch.int32)
draw(
    {
        "causal": RowIntervals.causal(N, N),
        "window of 12": RowIntervals.sliding_window(N, N, 12),
        "window, both sides": RowIntervals.sliding_window(N, N, 8, causal=False),
        "packed, causal": RowIntervals.packed(ends, ends, N, causal=True),
    }
)

# %% [markdown]
# With fewer queries than keys, causal has two meanings. `is_causal=True` is the first, top-left, as in SDPA; a chunk at
# the end of a cache needs the second.

# %%
draw(
    {
        "causal (top left)": RowIntervals.causal(16, N),
        "causal_lower_right": RowIntervals.causal_lower_right(16, N),
    },
    N,
)

# %% [markdown]
# ## Your own
#
# `start` and `end` are int32 tensors `[B or 1, rows]`; `key_mask` takes keys away from all rows; `intersect` combines.
# A prefix that sees itself, causal text after it, and padding:

# %%
row = torch.arange(N, dtype=torch.int32)[None]
prefix = RowIntervals(torch.zeros_like(row), torch.maximum(row + 1, torch.tensor(14, dtype=torch.int32)))
real = torch.ones(1, N, dtype=torch.bool)
real[:, :6] = False
padded = RowIntervals(prefix.start, prefix.end, key_mask=real)
both = padded.intersect(RowIntervals.sliding_window(N, N, 20))
draw({"prefix of 14": prefix, "6 keys of padding": padded, "and a window of 20": both})

# %% [markdown]
# A row without a key gives zeros and zero gradients, in every backend; a plain softmax gives NaN.

# %%
nothing = RowIntervals(row, row + (row >= 4))  # rows 0 to 3 see no key, the others see themselves
query, key, value = (torch.randn(1, 2, N, 64, device=device, requires_grad=True) for _ in range(3))
out = ffpa_attn_func(query, key, value, attn_mask=nothing.to(device))
out.square().sum().backward()
print("rows 0 to 3 are zero:", not out[:, :, :4].any().item())
print("and so are their gradients:", not query.grad[:, :, :4].any().item())
print("the others are their own value:", torch.allclose(out[:, :, 4:], value[:, :, 4:], atol=1e-6))

# %% [markdown]
# ## The same numbers as a dense mask

# %%
names = {"prefix": prefix, "padded": padded, "window": both, "packed": RowIntervals.packed(ends, ends, N, causal=True)}
for name, mask in names.items():
    mask = mask.to(device)
    ours = ffpa_attn_func(query, key, value, attn_mask=mask)
    dense = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.dense(N))
    seen = mask.dense(N).any(-1)[..., None]  # SDPA's rows without keys are left out of the comparison
    print(f"{name}: {((ours - dense) * seen).abs().nan_to_num().max().item():.1e}")

# %% [markdown]
# ## What a kernel visits
#
# Kernels work in blocks of keys for a tile of rows. A block that no row of the tile sees is never loaded; inside a
# block that every row sees, no element is tested. Here in tiles of 64 x 64 for 2048 tokens: white is skipped, blue is
# seen whole, orange lies on a border and is tested element by element.


# %%
def tiles(mask, length, size=64):
    """0: skipped, 1: on a border, 2: seen whole."""
    seen = mask.dense(length)[0, 0].view(length // size, size, length // size, size)
    return seen.any(3).any(1).int() + seen.all(3).all(1).int()


length = 2048
documents = torch.tensor([0, 300, 1000, 1100, 2048], dtype=torch.int32)
masks = {
    "causal": RowIntervals.causal(length, length),
    "window of 512": RowIntervals.sliding_window(length, length, 512),
    "four documents": RowIntervals.packed(documents, documents, length, causal=True),
}
fig, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
for ax, (title, mask) in zip(axes, masks.items(), strict=True):
    kinds = tiles(mask, length)
    ax.imshow(kinds, cmap=ListedColormap(["whitesmoke", "tab:orange", "tab:blue"]), interpolation="nearest")
    ax.set(title=f"{title}: {(kinds > 0).float().mean().item():.0%} visited", xticks=[], yticks=[])
axes[0].set_ylabel("tiles of queries")
plt.show()

# %% [markdown]
# For the gradients of keys and values a kernel needs the reverse: which rows can see a block of 64 keys.

# %%
first, last = masks["window of 512"].query_ranges(length)
print("rows that see keys 0..63:    ", first[0, 0].item(), "to", last[0, 0].item())
print("rows that see keys 960..1023:", first[0, 15].item(), "to", last[0, 15].item())

# %% [markdown]
# ## Memory

# %%
lengths = [2**power for power in range(10, 18)]
fig, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.plot(lengths, [n * n / 2**20 for n in lengths], label="bool tensor, N x N")
axes.plot(lengths, [4 * n * n / 2**20 for n in lengths], label="float32 tensor, N x N")
built = [RowIntervals.sliding_window(n, n, 1024) for n in lengths]
axes.plot(lengths, [(m.start.nbytes + m.end.nbytes) / 2**20 for m in built], label="RowIntervals")
axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MiB per mask")
axes.set_xscale("log", base=2)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What transformers builds
#
# With `attn_implementation="ffpa"` the masks of a model stay intervals. A hook on each attention of a small Gemma 4
# shows what it is handed: to model code it looks like the bool tensor it stands for, and `start` and `end` are inside.

# %%
from transformers import AutoModelForCausalLM, Gemma4TextConfig

config = Gemma4TextConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=12,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    global_head_dim=128,
    num_kv_shared_layers=0,
    hidden_size_per_layer_input=0,
    pad_token_id=0,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="ffpa").to(device).eval()
handed = {}
for layer in model.model.layers:
    kind = "sliding" if layer.self_attn.is_sliding else "global"

    def keep(module, args, kwargs, kind=kind):
        handed[kind] = kwargs["attention_mask"]

    layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)

tokens = torch.randint(1, 256, (1, N), device=device)
left_padded = torch.ones_like(tokens)
left_padded[:, :9] = 0
model(tokens, attention_mask=left_padded)
pictures = {f"{kind}, left padding": mask.dense()[0, 0] for kind, mask in handed.items()}
print({kind: mask for kind, mask in handed.items()})
positions = torch.cat([torch.arange(n) for n in (10, 18, 20)])[None].to(device)
model(tokens, position_ids=positions, use_cache=False)
pictures |= {f"{kind}, packed": mask.dense()[0, 0] for kind, mask in handed.items()}
draw(pictures)

# %% [markdown]
# And that is how the calls are served: `intervals` in the report's shapes.

# %%
print(ffpa_hf.report(model))
