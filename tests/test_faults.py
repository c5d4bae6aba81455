"""When something breaks during a call: a compiler that fails, memory that runs out. The caller's own is not harmed."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from oracle import DEVICE, HAS_GPU
from torch import Tensor

from ffpa_hf import dispatch, explain, ffpa_attn_func, report, settings
from ffpa_hf.kernels import building

WIDTH = 320  # above 256, where auto takes a kernel unasked


def qkv(grad: bool = False, length: int = 600, width: int = WIDTH) -> list[Tensor]:
    dtype = torch.bfloat16 if HAS_GPU else torch.float16
    return [torch.randn(1, 2, length, width, device=DEVICE).to(dtype).requires_grad_(grad) for _ in range(3)]


# --- compilers --------------------------------------------------------------------------------------------------------


def raising(error: Exception, module: str):
    """A function that raises as if it were the code of `module`."""
    scope = {"__name__": module, "error": error}
    exec("def forward(*_, **__):\n    raise error", scope)
    return scope["forward"]


@pytest.fixture
def broken_compiler(monkeypatch):
    """Every kernel's compiler fails, and the backends are back afterwards."""
    from ffpa_hf import ops

    class Broken:
        forward = staticmethod(raising(RuntimeError("ptxas: no such instruction\nline 2"), "triton.compiler.compiler"))

    real = ops._kernel
    monkeypatch.setattr(ops, "_kernel", lambda name: real(name) if name == "sdpa" else Broken)
    with settings.override(default_backend="triton"):  # else auto asks no kernel on a CPU
        yield
    dispatch._given_up.clear()
    dispatch.tables_changed()


@pytest.mark.parametrize("preference", [None, "triton"])
def test_auto_goes_on_where_a_kernel_cannot_be_built_and_says_so_once(broken_compiler, preference):
    from ffpa_hf.dispatch import Route
    from ffpa_hf.functional import attend

    query, key, value = qkv(grad=True)
    assert explain(query, key, value).forward != "sdpa"
    with pytest.warns(RuntimeWarning, match="could not build a kernel.*\n*.*no such instruction") as said:
        out = attend(query, key, value, is_causal=True, route=Route(preference))
    assert 1 <= len([one for one in said if one.category is RuntimeWarning]) <= 3  # one for each backend
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert (out - want).abs().max() < 1e-2
    out.sum().backward()
    assert all(one.grad.isfinite().all() for one in (query, key, value))
    plan = explain(query, key, value)
    assert plan.forward == "sdpa" and "no such instruction" in str(plan)
    assert [row.backend for row in report().rows] == ["sdpa"]  # what failed served nothing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ffpa_attn_func(query, key, value, is_causal=True), out)


def test_a_kernel_that_cannot_be_built_is_left_out_for_its_head_dim_alone(broken_compiler):
    with pytest.warns(RuntimeWarning, match="could not build a kernel for head dim 320"):
        ffpa_attn_func(*qkv())
    assert explain(*qkv()).forward == "sdpa"
    assert explain(*qkv(width=384)).forward == "triton"


@pytest.mark.parametrize("preference", ["cuda", "cuda-fp8"])
def test_each_kernel_of_a_backend_is_left_out_by_itself(broken_compiler, monkeypatch, preference):
    from ffpa_hf.dispatch import Route
    from ffpa_hf.functional import attend

    class Accepting:
        supports = staticmethod(lambda *_, **__: dispatch.Accepted())

    for name in ("cuda", "cuda.fp8"):
        monkeypatch.setitem(dispatch._MODULES, name, (Accepting, None))
    query, key, value = qkv()
    with pytest.warns(RuntimeWarning, match="could not build a kernel"):
        out = attend(query, key, value, route=Route(preference))
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert (out - want).abs().max() < 1e-2
    other = {"cuda": "cuda-fp8", "cuda-fp8": "cuda"}[preference]
    assert explain(query, key, value, backend=other).forward == "cuda"


def test_an_explicit_request_raises_with_the_compilers_words(broken_compiler, forced):
    query, key, value = qkv()
    for _ in range(2):  # and goes on asking: it was explicit
        with pytest.raises(RuntimeError, match="could not build.*backend='sdpa'.*ptxas: no such instruction\nline 2"):
            ffpa_attn_func(query, key, value, backend="triton")


@pytest.mark.parametrize(
    "error, module",
    [
        (torch.OutOfMemoryError("out of memory"), "triton.compiler.compiler"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "triton.runtime.jit"),
        (ValueError("a bug of ours"), "ffpa_hf.kernels.triton.launch"),
    ],
)
def test_no_other_failure_is_taken_for_the_compilers(monkeypatch, error, module):
    from ffpa_hf import ops

    class Broken:
        forward = staticmethod(raising(error, module))

    monkeypatch.setattr(ops, "_kernel", lambda name: Broken)
    with pytest.raises(type(error)) as raised, settings.override(default_backend="triton"):
        ffpa_attn_func(*qkv())
    assert raised.value is error and not dispatch._given_up


REAL = """
import os
from ffpa_hf.kernels.building import is_build_failure
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget

@triton.jit
def wrong(x_ptr):
    tl.store(x_ptr, tl.no_such_thing(1.0))

def failure(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error

source = triton.compiler.ASTSource(wrong, {"x_ptr": "*fp32"})
found = failure(lambda: triton.compile(source, target=GPUTarget("cuda", 90, 32)))
assert found is not None and is_build_failure(found), repr(found)
from triton.runtime import build
os.environ.pop("CC", None)
os.environ["PATH"] = ""
found = failure(lambda: build._build("nothing", "nothing.c", ".", [], [], [], []))
assert isinstance(found, RuntimeError) and is_build_failure(found), repr(found)
assert not is_build_failure(failure(lambda: 1 / 0))
"""


def test_real_compilers_that_fail_are_recognised(tmp_path):
    (tmp_path / "real.py").write_text(REAL)  # Triton reads the source of its kernels
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, tmp_path / "real.py"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_cuda_kernel_that_does_not_compile_is_recognised():
    pytest.importorskip("cuda.core")
    from ffpa_hf.kernels.cuda import program

    variant = program.Variant("native_forward", "sm_90", (("BFLOAT16", 0), ("D", 64)))
    with pytest.raises(RuntimeError, match="did not compile") as raised:
        program._compile(variant)
    assert building.is_build_failure(raised.value)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_out_of_memory_leaves_tensors_and_gradients_as_they_were(monkeypatch, which):
    leaves = qkv(grad=True, length=16, width=64)
    before = [leaf.detach().clone() for leaf in leaves]
    with settings.override(force_no_sdpa_fallback=True):
        out = ffpa_attn_func(*leaves, backend="triton")
        want = torch.autograd.grad(out.sum(), leaves)
        out = ffpa_attn_func(*leaves, backend="triton")
        real, left = Tensor.new_empty, [0 if which == "forward" else 1]

        def full(self, *sizes, **options):
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return real(self, *sizes, **options)

        with monkeypatch.context() as no_room, pytest.raises(torch.OutOfMemoryError):
            no_room.setattr(Tensor, "new_empty", full)
            if which == "forward":
                ffpa_attn_func(*leaves, backend="triton")
            else:
                out.sum().backward()
        assert all(torch.equal(leaf, kept) and leaf.grad is None for leaf, kept in zip(leaves, before, strict=True))
        out = ffpa_attn_func(*leaves, backend="triton")  # and everything works again
        again = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.equal(got, expected) for got, expected in zip(again, want, strict=True))
    assert not dispatch._given_up
