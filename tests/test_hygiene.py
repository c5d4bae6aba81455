"""What a process may expect of a library in it: no thread, no changed state of torch or Python, after failures too."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from oracle import DEVICE

import ffpa_hf
from ffpa_hf import ffpa_attn_func

#: Everything of a process that a library could change behind its user's back.
STATE = """
import copy, gc, logging, os, pickle, random, signal, sys, threading, warnings
import torch, torch.nn.functional as F

def state():
    modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    fused = torch.backends.cuda
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": dict(os.environ),
        "random numbers": (torch.get_rng_state().tolist(), random.getstate()),
        "torch": (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.get_default_device(), torch.get_num_threads(), torch.get_num_interop_threads(),
            torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory,
            torch.is_deterministic_algorithms_warn_only_enabled(), torch.get_float32_matmul_precision(),
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(),
            torch.is_anomaly_enabled(), modes,
        ),
        "backends": (
            fused.flash_sdp_enabled(), fused.mem_efficient_sdp_enabled(), fused.math_sdp_enabled(),
            fused.cudnn_sdp_enabled(), torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark,
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32,
        ),
        "functions": (F.scaled_dot_product_attention, torch.softmax, F.softmax, torch.compile),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "hooks": (sys.excepthook, sys.displayhook, threading.excepthook, signal.getsignal(signal.SIGINT),
                  signal.getsignal(signal.SIGTERM), sys.getrecursionlimit(), gc.isenabled()),
        "logging": (logging.root.level, list(logging.root.handlers), logging.lastResort),
    }

def same(before, what):
    after = state()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, (what, changed)

"""

WORK = """
before = state()
import ffpa_hf
same(before, "import")
from ffpa_hf import ffpa_attn_func

query = torch.zeros(1, 2, 8, 64, requires_grad=True)
ffpa_attn_func(query, query, query, return_lse=True)[0].sum().backward()
print(ffpa_hf.explain(query, query, query), ffpa_hf.report())
same(before, "calls")
wrong = [
    dict(backend="cuda"), dict(backend="triton"), dict(backend="nothing"), dict(dropout_p=2.0), dict(softcap=-1.0),
    dict(attn_mask=torch.zeros(3, 3)), dict(sinks=torch.zeros(5)), dict(enable_gqa=7, key=query[:, :0]),
]
failed = 0
for changes in wrong:
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            inside = state()
            try:
                ffpa_attn_func(**{"query": query, "key": query, "value": query, **changes})
            except (TypeError, ValueError, NotImplementedError, RuntimeError):
                failed += 1
            same(inside, changes)
assert failed > 15, failed
with torch.autocast("cpu", torch.bfloat16):
    inside = state()
    ffpa_attn_func(query, query, query, torch.zeros(8, 8), softcap=2.0)
    same(inside, "autocast")
same(before, "failed calls")
"""

MODELS = """
import transformers, diffusers
from diffusers import AutoencoderKL
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2))
vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
ids = torch.ones(1, 4, dtype=torch.long)
with torch.no_grad():
    plain = model(ids).logits
before = state()
import ffpa_hf
same(before, "import beside both libraries")
for one in (model, vae):
    with ffpa_hf.enabled(one, backend="sdpa"):
        same(before, "enable")
    same(before, "disable")
    for wrong in (dict(backend="nothing"), dict(no_such_option=1)):
        try:
            ffpa_hf.enable(one, **wrong)
        except (TypeError, ValueError):
            same(before, "failed enable")
        else:
            raise AssertionError(wrong)
with ffpa_hf.enabled(model):
    assert (model(ids).logits - plain).abs().max() < 1e-5
same(before, "a model's call")
assert torch.equal(model(ids).logits, plain)
ffpa_hf.unregister()
same(before, "unregister")
"""


@pytest.mark.parametrize("program", [WORK, MODELS], ids=["functions", "models"])
def test_no_thread_and_no_state_of_torch_or_python_is_changed(program):
    if program is MODELS:
        pytest.importorskip("transformers")
        pytest.importorskip("diffusers")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FFPA_", "TRITON_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", STATE + program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_many_threads_get_what_one_gets():
    """Plans, warnings and counters are shared by threads; results are not."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 2, 4 + index % 5, 40 + 8 * (index % 3)) for index in range(12)]
    calls = []
    for index, shape in enumerate(shapes):
        tensors = [torch.randn(shape, generator=generator).to(DEVICE) for _ in range(3)]
        calls.append((tensors, {"is_causal": bool(index % 2), "softcap": 3.0 if index % 3 == 0 else None}))

    def run(tensors, keywords):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = ffpa_attn_func(*leaves, **keywords)
        return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]

    want = [run(*call) for call in calls]
    ffpa_hf.report()
    found: dict[int, list] = {}
    faults: list[BaseException] = []
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        try:
            start.wait()
            for index in range(thread, thread + 24):
                found[thread * 100 + index] = (index % len(calls), run(*calls[index % len(calls)]))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not faults and len(found) == 8 * 24
    for index, got in found.values():
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want[index], strict=True))
