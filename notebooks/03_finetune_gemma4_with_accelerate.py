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
# # Fine-tune a Gemma 4 with Accelerate
#
# Gemma 4 alternates sliding-window layers of head dim 256 with global layers of head dim 512. PyTorch's fast attention
# kernels end at 256 and take no window, so training falls back to slow ones. With `ffpa_hf` the whole change is one
# argument: `attn_implementation="ffpa"`, forward and backward.
#
# This notebook needs no download and no GPU: a small model with random weights, trained on *Alice in Wonderland*, one
# byte a token. On a CPU `ffpa_hf` has no kernel and says so; masks, packing and numbers are the same as on a GPU, where
# the recipe grows and the kernels run.

# %%
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress")  # progress bars are plain text here
warnings.filterwarnings("ignore", category=FutureWarning)

import matplotlib.pyplot as plt
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

import ffpa_hf
from ffpa_hf.demo.finetune import ON_CPU, ON_GPU, Windows, read_text, write_checkpoint

transformers.utils.logging.disable_progress_bar()

on_gpu = torch.cuda.is_available()
recipe = ON_GPU if on_gpu else replace(ON_CPU, sequence=192, window=48)
accelerator = Accelerator(mixed_precision="bf16" if on_gpu else "no")
steps = 40 if on_gpu else 24
print(f"ffpa_hf {ffpa_hf.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
print(torch.cuda.get_device_name() if on_gpu else "CPU")

# %% [markdown]
# ## The model
#
# Its weights are written to a folder first, so that every run below starts from the same ones by `from_pretrained`, as
# it would with a name from the Hub.

# %%
folder = tempfile.mkdtemp()
write_checkpoint(recipe, Path(folder), seed=0)


def load(attention):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).train()


for layer in load("ffpa").model.layers:
    attention = layer.self_attn
    kind = f"window of {attention.config.sliding_window}" if attention.is_sliding else "global"
    print(f"layer {attention.layer_idx}: head dim {attention.head_dim}, {kind}")

# %% [markdown]
# ## What will run
#
# `explain` answers before anything runs: which backend serves a call of this shape here, and why the others do not.

# %%
query = torch.empty(1, recipe.heads, recipe.sequence, recipe.global_head_dim, device=accelerator.device)
key = torch.empty(1, recipe.key_value_heads, recipe.sequence, recipe.global_head_dim, device=accelerator.device)
if on_gpu:
    query, key = query.bfloat16(), key.bfloat16()
print(ffpa_hf.explain(query, key, key, is_causal=True, enable_gqa=True))

# %% [markdown]
# ## One loop, three attentions
#
# An ordinary Accelerate loop with warm-up and clipping. It never mentions `ffpa_hf`.


# %%
def train(model, learning_rate=recipe.learning_rate):
    """Losses in nats per byte and seconds per step."""
    set_seed(0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    batches = torch.utils.data.DataLoader(
        Windows(read_text(), recipe.sequence, steps * recipe.batch, seed=0), batch_size=recipe.batch
    )
    model, optimizer, batches, warm_up = accelerator.prepare(model, optimizer, batches, warm_up)
    losses, seconds = [], []
    for tokens in batches:
        begin = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return losses, seconds


curves = {}
for attention in ("eager", "sdpa", "ffpa"):
    model = load(attention)
    curves[attention], seconds = train(model)
    speed = f", {sorted(seconds)[len(seconds) // 2] * 1e3:.0f} ms per step" if on_gpu else ""
    print(f"{attention:5}: {curves[attention][0]:.3f} to {curves[attention][-1]:.3f} nats per byte{speed}")

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for (name, losses), style in zip(curves.items(), (":", "-", "--"), strict=True):
    left.plot(losses, style, label=name, linewidth=2)
left.set(title="loss", xlabel="step", ylabel="nats per byte")
for name, style in (("eager", ":"), ("ffpa", "--")):
    gaps = [abs(a - b) for a, b in zip(curves[name], curves["sdpa"], strict=True)]
    right.plot(gaps, style, label=name, linewidth=2)
right.set(title='distance from the "sdpa" curve', xlabel="step", ylabel="nats per byte")
for axes in (left, right):
    axes.legend(frameon=False)
plt.show()

# %% [markdown]
# "eager" and "sdpa" are both PyTorch's, and rounding alone takes them apart; training slowly amplifies that. "ffpa"
# stays as near. (On a CPU it hands the call to the same SDPA, and the distance is zero.)
#
# ## Who served it
#
# `report` counts, per module, what each call went to. Sliding layers carry `intervals`: two numbers for each query row
# instead of a row of a dense mask.

# %%
print(ffpa_hf.report(model))

# %% [markdown]
# ## LoRA
#
# PEFT wraps the projections; attention between them is untouched, so nothing changes for `ffpa_hf`.

# %%
set_seed(0)
adapted = get_peft_model(
    load("ffpa"), LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
)
adapted.print_trainable_parameters()
losses, _ = train(adapted, learning_rate=3e-3)
print(f"{losses[0]:.3f} to {losses[-1]:.3f} nats per byte")

# %% [markdown]
# ## Packing
#
# Documents of unequal length, joined into one row instead of padded to the longest. `DataCollatorWithFlattening`
# restarts `position_ids` at each document and, with `return_flash_attn_kwargs=True`, adds the bounds. `"ffpa"` turns
# either into row intervals: no document sees another one, and no time goes to padding. Here are the loss of the packed
# row, of the padded batch, and of each document alone:

# %%
lengths = [40, 150, 75, 110, 25] if not on_gpu else [400, 2000, 750, 1100, 250]
text = read_text()[1000:]
documents = []
for length in lengths:
    documents.append({"input_ids": list(text[:length])})
    text = text[length:]
packed = dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True)(documents))
longest = max(lengths)
padded = {
    "input_ids": torch.tensor([d["input_ids"] + [0] * (longest - len(d["input_ids"])) for d in documents]),
    "attention_mask": torch.tensor([[1] * n + [0] * (longest - n) for n in lengths]),
}
padded["labels"] = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)


def on_device(batch):
    return {key: value.to(accelerator.device) if torch.is_tensor(value) else value for key, value in batch.items()}


packed, padded = on_device(packed), on_device(padded)
model = load("ffpa").to(accelerator.device)
with torch.no_grad(), accelerator.autocast():
    together = model(**packed, use_cache=False).loss.item()
    with_padding = model(**padded, use_cache=False).loss.item()
    total = 0.0
    for document in documents:
        tokens = torch.tensor([document["input_ids"]], device=accelerator.device)
        total += model(input_ids=tokens, labels=tokens, use_cache=False).loss.item() * (tokens.numel() - 1)
    alone = total / sum(n - 1 for n in lengths)
print(f"packed {together:.6f}   padded {with_padding:.6f}   apart {alone:.6f}")
print(f"tokens that the model works on: packed {sum(lengths)}, padded {longest * len(lengths)}")

# %% [markdown]
# ## Memory
#
# What autograd keeps for the backward pass, in the forms above, with and without checkpointing. Use
# `use_reentrant=False`: the reentrant kind loses gradients in models that share keys and values between layers (Gemma 4
# E2B, E4B, Gemma 3n), whatever the attention implementation.


# %%
def kept(batch, checkpointing):
    """Megabytes that the graph of one step holds, parameters left out."""
    model = load("ffpa").to(accelerator.device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), accelerator.autocast():
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    return sum(seen.values()) / 1e6


bars = {
    f"{name}{', checkpointed' if checkpointing else ''}": kept(batch, checkpointing)
    for name, batch in (("padded", padded), ("packed", packed))
    for checkpointing in (False, True)
}
fig, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
axes.barh(list(bars), list(bars.values()), color=["tab:gray", "tab:gray", "tab:blue", "tab:blue"])
for row, megabytes in enumerate(bars.values()):
    axes.text(megabytes, row, f" {megabytes:.1f} MB", va="center")
axes.invert_yaxis()
axes.set(title="kept for the backward pass", xlabel="MB", xlim=(0, 1.2 * max(bars.values())))
plt.show()

# %% [markdown]
# ## As scripts
#
# The same as command-line scripts, for a model of your own: `examples/finetune_accelerate.py`,
# `examples/finetune_trainer.py`, `examples/finetune_trl_sft.py` (packing by TRL) and `examples/finetune_lora.py`.
