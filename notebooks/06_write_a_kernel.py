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
# # Write a kernel
#
# A tour for contributors: the definition that every kernel is held to, the idea of all of them, a small Triton kernel
# written from scratch, and what it takes to become a backend. Without a GPU the kernel runs in Triton's interpreter,
# which has to be asked for before Triton is imported.

# %%
import math
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import matplotlib.pyplot as plt
import triton
import triton.language as tl

import ffpa_hf
from ffpa_hf import RowIntervals
from ffpa_hf.kernels import reference

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"ffpa_hf {ffpa_hf.__version__}, torch {torch.__version__}, triton {triton.__version__}, {device}")

# %% [markdown]
# ## The definition
#
# `kernels/reference.py` is the operation in plain torch: dense, differentiable, in the precision that it is given.
# Kernels are tested against it in float64. It returns the output and the log-sum-exp of each row, which is all that a
# backward needs to know about the softmax.

# %%
N, D = 192, 128
torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, N, D, device=device, dtype=torch.float16) for _ in range(3))
mask = RowIntervals.sliding_window(N, N, 80, device=device)
scale = 1 / math.sqrt(D)
exact, exact_lse = reference.attention(
    query.double(), key.double(), value.double(), scale=scale, row_start=mask.start, row_end=mask.end
)
print(exact.shape, exact_lse.shape)

# %% [markdown]
# ## Online softmax
#
# No kernel holds a row of N scores. It walks blocks of keys and keeps, per row, the largest score so far, the sum of
# exponentials, and the weighted sum of values; when a larger score comes, the sums are rescaled. In float64, for one
# head:


# %%
def walk(query, key, value, start, end, block=32):
    """(out, log-sum-exp, largest scores after each block) of one head, a block of keys at a time."""
    rows = query.shape[0]
    peak = torch.full((rows,), -math.inf, dtype=query.dtype)
    total, sums, seen = torch.zeros_like(peak), torch.zeros_like(query), []
    for begin in range(0, key.shape[0], block):
        keys = torch.arange(begin, min(begin + block, key.shape[0]))
        scores = query @ key[keys].T * scale
        hidden = (keys < start[:, None]) | (keys >= end[:, None])
        scores = scores.masked_fill(hidden, -math.inf)
        new_peak = torch.maximum(peak, scores.amax(1))
        pivot = new_peak.masked_fill(new_peak == -math.inf, 0.0)  # rows that saw nothing yet must not give NaN
        weights = torch.exp(scores - pivot[:, None])
        shrink = torch.exp(peak - pivot)
        total = total * shrink + weights.sum(1)
        sums = sums * shrink[:, None] + weights @ value[keys]
        peak = new_peak
        seen.append(peak.clone())
    return sums / total[:, None], peak + total.log(), torch.stack(seen, 1)


head = [x[0, 0].double().cpu() for x in (query, key, value)]
out, lse, peaks = walk(*head, mask.start[0].cpu(), mask.end[0].cpu())
gaps = [(found - truth[0, 0].cpu()).abs().max() for found, truth in ((out, exact), (lse, exact_lse))]
print(f"out differs by {gaps[0]:.1e}, lse by {gaps[1]:.1e}")
fig, axes = plt.subplots(figsize=(7, 3), layout="constrained")
drawn = axes.imshow(peaks.T.masked_fill(peaks.T == -math.inf, math.nan), aspect="auto", interpolation="nearest")
axes.set(xlabel="query row", ylabel="block of 32 keys", title="largest score so far (white: the row has seen no key)")
fig.colorbar(drawn)
plt.show()

# %% [markdown]
# Left of the window a block changes nothing, right of it neither: a kernel skips those blocks for a whole tile of rows.
# The running maximum settles after a block or two, so that most rescalings multiply by one.
#
# ## The same in Triton
#
# One program per head and tile of rows. Names follow the code of the house: `B H N D` sizes, `BM BN` blocks, `i_` an
# index, `o_` offsets, `p_` a pointer. Work is in base 2, since the hardware has `exp2`; strides are arguments, so
# nothing has to be contiguous but the last dimension.


# %%
@triton.jit
def forward(
    p_query, p_key, p_value, p_start, p_end, p_out, p_lse,
    stride_qh, stride_qn, stride_kh, stride_kn, stride_vh, stride_vn, stride_oh, stride_on, N, scale_log2,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i_tile, i_head = tl.program_id(0), tl.program_id(1)
    o_m = i_tile * BM + tl.arange(0, BM)
    o_n, o_d = tl.arange(0, BN), tl.arange(0, D)
    row = o_m < N
    i_head = i_head.to(tl.int64)  # offsets may pass 2^31
    p_query += i_head * stride_qh
    p_key += i_head * stride_kh
    p_value += i_head * stride_vh
    p_out += i_head * stride_oh
    query = tl.load(p_query + o_m[:, None] * stride_qn + o_d[None, :], mask=row[:, None], other=0.0)  # [BM, D]
    start = tl.load(p_start + o_m, mask=row, other=N)
    end = tl.load(p_end + o_m, mask=row, other=0)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, D], tl.float32)
    first = tl.min(start, 0) // BN * BN  # whole blocks that no row of the tile sees are not visited
    for i_n in range(first, tl.max(end, 0), BN):
        o_key = i_n + o_n
        inside = o_key < N
        key = tl.load(p_key + o_key[:, None] * stride_kn + o_d[None, :], mask=inside[:, None], other=0.0)  # [BN, D]
        scores = tl.dot(query, tl.trans(key)) * scale_log2  # [BM, BN]
        seen = (o_key[None, :] >= start[:, None]) & (o_key[None, :] < end[:, None]) & inside[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        pivot = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(peak - pivot)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(p_value + o_key[:, None] * stride_vn + o_d[None, :], mask=inside[:, None], other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        peak = new_peak
    alive = total > 0  # a row without a key: zeros, and minus infinity
    out = sums / tl.where(alive, total, 1.0)[:, None]
    tl.store(p_out + o_m[:, None] * stride_on + o_d[None, :], out.to(p_out.dtype.element_ty), mask=row[:, None])
    lse = (peak + tl.log2(tl.where(alive, total, 1.0))) * 0.6931471805599453
    tl.store(p_lse + i_head * N + o_m, lse, mask=row)


def run(query, key, value, mask, BM=32, BN=32):
    """The kernel on one batch; memory that it should write starts as NaN, so that a forgotten element shows."""
    _, heads, length, head_dim = query.shape
    out = torch.full_like(query, math.nan)
    lse = torch.full((1, heads, length), math.nan, device=query.device)
    forward[(triton.cdiv(length, BM), heads)](
        query, key, value, mask.start, mask.end, out, lse,
        *(stride for x in (query, key, value, out) for stride in x.stride()[1:3]),
        length, scale * math.log2(math.e), D=head_dim, BM=BM, BN=BN,
    )  # fmt: skip
    return out, lse


out, lse = run(query, key, value, mask)

# %% [markdown]
# ## Judged in float64
#
# The rule of the house: at most twice the error of PyTorch's attention in the same dtype, against the float64 result of
# the same inputs.

# %%
import torch.nn.functional as F


def distance(result):
    return ((result.double() - exact).norm() / exact.norm()).item()


library = ffpa_hf.ffpa_attn_func(
    query, key, value, attn_mask=mask, backend="triton" if device == "cuda" else None
)  # what you would compare with
torch_out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.dense(N))
print(f"this kernel {distance(out):.2e}, SDPA {distance(torch_out):.2e}, ffpa_attn_func {distance(library):.2e}")
print("log-sum-exp to", f"{(lse.double() - exact_lse).abs().max().item():.1e}")
assert distance(out) <= 2 * distance(torch_out)

# %% [markdown]
# Odd inputs are where kernels fail: a length that fills no tile, rows that see nothing, another memory layout.

# %%
cases = {}
for title, length, keep in (
    ("length 1", 1, None),
    ("length 61", 61, None),
    ("no row sees a key", 61, 0),
    ("every other row sees nothing", 61, 2),
):
    short = [x[:, :, :length] for x in (query, key, value)]
    rows = RowIntervals.causal(length, length, device=device)
    if keep is not None:
        index = torch.arange(length, device=device)[None]
        alive = (index % keep == 0) if keep else torch.zeros_like(index, dtype=torch.bool)
        rows = RowIntervals(rows.start, torch.where(alive, rows.end, rows.start))
    truth, truth_lse = reference.attention(
        *(x.double() for x in short), scale=scale, row_start=rows.start, row_end=rows.end
    )
    given, given_lse = run(*short, rows)
    wrong = (given.double() - truth).abs().max().item()
    dead = (truth_lse == -math.inf) == (given_lse == -math.inf)
    print(f"{title}: largest error {wrong:.1e}, dead rows agree: {dead.all().item()}")

# %%
apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]  # [B, N, H, D] in memory
strided, _ = run(*apart, mask)
print("strided inputs give the same bits:", torch.equal(strided, out), "| strides", tuple(apart[0].stride()))

# %% [markdown]
# ## What it costs
#
# Tiles that the kernel visits, of all: what skipping is worth as the sequence grows and the window stays.

# %%
lengths = [2**power for power in range(9, 15)]


def visited(mask, length, BM=64, BN=64):
    """Share of tiles that the loop above enters."""
    first = mask.start[0].view(-1, BM).amin(1) // BN
    last = (mask.end[0].view(-1, BM).amax(1) + BN - 1) // BN
    return ((last - first).clamp(min=0).sum() / ((length // BM) * (length // BN))).item()


fig, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
for name, make in (
    ("causal", lambda n: RowIntervals.causal(n, n)),
    ("window of 1024", lambda n: RowIntervals.sliding_window(n, n, 1024)),
    ("window of 256", lambda n: RowIntervals.sliding_window(n, n, 256)),
):
    axes.plot(lengths, [visited(make(n), n) for n in lengths], "o-", label=name)
axes.set_xscale("log", base=2)
axes.set(xlabel="tokens", ylabel="tiles visited, of all", ylim=(0, 1))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Becoming a backend
#
# A backend is a folder of `kernels/` with three functions: `supports`, `forward`, `backward`. `supports` never raises.
# It answers, and the planner turns the answers into choices, warnings, errors and the table in the documentation. What
# our kernel could do is a `Capability`:

# %%
from dataclasses import replace

from ffpa_hf.call import AttentionCall
from ffpa_hf.kernels.common import Accepted, Capability, refusal

CAPABILITY = Capability(
    backend="notebook",
    dtypes=(torch.float16, torch.bfloat16),
    head_dims=(64, 128),
    head_dim_step=64,
    masks=("none", "intervals"),
    bias=False,
)


def supports(call, config=None, *, backward=False):
    return refusal(CAPABILITY, call, backward=backward) or Accepted("a kernel from a notebook")


plain = AttentionCall(1, 8, 8, 4096, 4096, 128, 128, torch.bfloat16, capability=(9, 0), device_name="NVIDIA H200")
for changes in (
    {},
    {"mask_kind": "bool"},
    {"dropout_p": 0.1},
    {"head_dim": 512, "value_dim": 512},
    {"capability": (7, 5)},
):
    answer = supports(replace(plain, **changes))
    print(changes or "plain", "->", "accepted" if answer.accepted else f"{answer.kind}: {answer.reason}")

# %% [markdown]
# A kernel that never ran on a kind of GPU stays off there. The verdict belongs to a hash of the sources: change a
# kernel, and the suite fails until `ffpa-hf selftest` has passed on a GPU and its results are recorded.

# %%
from ffpa_hf.kernels import qualification

for family in qualification.FAMILIES:
    print(f"{family} (sources {qualification.source_hash(family)})")
    for target in ((9, 0), (8, 0)):
        print("   ", qualification.verdict(family, target).text)

# %% [markdown]
# ## Where to go on
#
# - `ffpa_hf/kernels/triton/forward_kernel.py`: this loop in three phases, so that only blocks on a border test
#   elements, with masks, bias, softcap, sinks and dropout as named primitives.
# - `ffpa_hf/kernels/triton/configs.py`: tiles as data, one function that says which are legal.
# - `tests/kernels/test_triton.py`: how kernels are judged. `docs/kernels.md`: what was tried, predicted and seen.
# - `make compile-table`: every tile for every target, compiled without a GPU.
