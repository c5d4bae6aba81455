"""One attention call through our Triton kernels without a GPU, forward and backward, in Triton's interpreter.

The interpreter is asked for by an environment variable that Triton reads when it is imported, hence its own process:
`run_interpreted` starts one, and `python -m ffpa_hf.demo.interpreted` is what it starts. Knows nothing of models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from ffpa_hf.demo.evidence import Check

#: Judged against fp64: at most this many times SDPA's own error in fp16, plus one fp16 rounding.
TIMES_SDPA_ERROR = 2.0
ONE_ROUNDING = 2.0**-11
_SHAPES = {"query": (1, 2, 96, 512), "key": (1, 1, 160, 512), "value": (1, 1, 160, 512)}


def run_interpreted() -> tuple[list[Check], str]:
    """The checks (output and three gradients) and a sentence that says what was run.

    Where Triton is not installed or fails, the one check that comes back has failed and says why.
    """
    environment = dict(os.environ, TRITON_INTERPRET="1", FFPA_FORCE_NO_SDPA_FALLBACK="1")
    done = subprocess.run(
        [sys.executable, "-m", "ffpa_hf.demo.interpreted"], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [Check("Triton kernels in the interpreter", False, reason[0], "runs", "the kernels must run")], ""
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    checks = [
        Check(
            name=f"Triton kernels in the interpreter: {name} against fp64, relative error",
            passed=error <= TIMES_SDPA_ERROR * sdpa + ONE_ROUNDING,
            measured=f"{error:.1e}",
            allowed=f"{TIMES_SDPA_ERROR * sdpa + ONE_ROUNDING:.1e}",
            why=f"twice the error of PyTorch's SDPA in fp16, {sdpa:.1e}, plus one fp16 rounding",
        )
        for name, (error, sdpa) in found["errors"].items()
    ]
    text = (
        f"The Triton kernels themselves were run as well, in Triton's interpreter: one causal call, two query heads "
        f"over one key/value head, {found['shape']}, forward and backward in {found['seconds']:.1f} s (an interpreter "
        f"is slow; this shows the numbers, not the speed)."
    )
    return checks, text


def _measure() -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    import ffpa_hf

    torch.manual_seed(0)
    inputs = {name: torch.randn(shape, dtype=torch.float16) for name, shape in _SHAPES.items()}
    towards = torch.randn(_SHAPES["query"], dtype=torch.float16)

    def through(attention: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
        out = attention(**leaves, is_causal=True, enable_gqa=True)
        gradients = torch.autograd.grad(out, list(leaves.values()), towards.to(dtype))
        names = ["output", *(f"{name} gradient" for name in leaves)]
        return {name: tensor.detach().double() for name, tensor in zip(names, (out, *gradients), strict=True)}

    truth = through(F.scaled_dot_product_attention, torch.float64)
    sdpa = through(F.scaled_dot_product_attention, torch.float16)
    start = time.perf_counter()
    ours = through(lambda **given: ffpa_hf.ffpa_attn_func(**given, backend="triton"), torch.float16)
    seconds = time.perf_counter() - start

    def error(of: dict[str, torch.Tensor], name: str) -> float:
        return ((of[name] - truth[name]).norm() / truth[name].norm()).item()

    shape = "96 x 160 tokens, head dim 512, fp16"
    return {
        "errors": {name: (error(ours, name), error(sdpa, name)) for name in truth},
        "seconds": seconds,
        "shape": shape,
    }


if __name__ == "__main__":
    print(json.dumps(_measure()))
