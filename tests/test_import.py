"""`import ffpa_hf` in a fresh process: cheap, quiet, and unhurt by packages that are missing or broken."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OPTIONAL = ["triton", "cutlass", "diffusers", "transformers"]
WAYS = {
    "missing": "raise ModuleNotFoundError(f'No module named {name!r}', name=name)",
    "broken library": "raise OSError('libbroken.so: undefined symbol: x')",
    "broken attribute": "raise AttributeError('module has no attribute y')",
}

#: Run before anything else: imports of one package fail in one way.
BREAKER = """
import importlib.abc, importlib.machinery, sys

class Breaker(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != {package!r}:
            return None
        if {missing}:
            self.exec_module(None, name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return None
    def exec_module(self, module, name={package!r}):
        {way}

sys.meta_path.insert(0, Breaker())
"""

WORK = """
import torch
import ffpa_hf
from ffpa_hf.call import AttentionCall
from ffpa_hf.dispatch import Route, plan

assert not torch.cuda.is_initialized()
loaded = {name.split(".")[0] for name in sys.modules}
assert not loaded & {"transformers", "diffusers", "triton", "cutlass", "accelerate", "typer", "rich"}, loaded

query = torch.randn(1, 2, 8, 64, requires_grad=True)
out, lse = ffpa_hf.ffpa_attn_func(query, query, query, is_causal=True, return_lse=True)
out.sum().backward()
expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
assert torch.allclose(out, expected, atol=1e-5)
call = AttentionCall(1, 8, 8, 1024, 1024, 512, 512, torch.bfloat16, "cuda", (9, 0), False, "NVIDIA H200")
print(plan(call))
print(plan(call, Route("triton", strict=True)))
print(ffpa_hf.explain(query, query, query))
assert not torch.cuda.is_initialized()
"""


def python(program: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FFPA_", "TRITON_"))} | environment
    return subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, env=env)


@pytest.mark.parametrize("package", OPTIONAL)
@pytest.mark.parametrize("way", WAYS)
def test_the_package_works_without_an_optional_one(package, way):
    breaker = BREAKER.format(package=package, way=WAYS[way], missing=way == "missing")
    done = python(breaker + WORK, FFPA_ALLOW_UNQUALIFIED="1")
    assert done.returncode == 0, done.stderr
    if package == "triton":  # and it is said why
        problem = {"missing": "No module named", "broken library": "libbroken", "broken attribute": "attribute y"}[way]
        assert problem in done.stdout and "raises RuntimeError" in done.stdout, done.stdout
        assert "could serve it: F.scaled_dot_product_attention" in done.stdout


def test_a_broken_triton_is_named_with_the_interpreter_too():
    breaker = BREAKER.format(package="triton", way=WAYS["broken library"], missing=False)
    program = breaker + (
        "import torch, ffpa_hf\n"
        "query = torch.randn(1, 1, 600, 64, dtype=torch.float16)\n"
        "ffpa_hf.ffpa_attn_func(query, query, query)\n"
        "print(ffpa_hf.explain(query, query, query, backend='triton'))\n"
    )
    done = python(program, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "raises RuntimeError" in done.stdout and "libbroken.so" in done.stdout


def test_the_import_is_quiet_and_lean():
    program = (
        "import sys, ffpa_hf, torch\n"
        "heavy = [name for name in sys.modules if name.startswith(('torch._dynamo', 'torch._inductor', 'triton', "
        "'transformers', 'diffusers', 'accelerate', 'cutlass', 'typer', 'rich', 'matplotlib', 'PIL'))]\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(sorted(heavy))\n"
    )
    done = python(program, "-W", "error::UserWarning", "-W", "error::DeprecationWarning:ffpa_hf")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]" and done.stderr == ""


def test_the_import_and_a_call_touch_neither_network_nor_files_to_write(tmp_path):
    program = (
        "import builtins, socket, sys\n"
        "def refuse(*args, **keywords): raise AssertionError('network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "import torch\n"
        "real = builtins.open\n"
        "def watched(file, mode='r', *args, **keywords):\n"
        "    assert not set(mode) & set('wax+'), (file, mode)\n"
        "    return real(file, mode, *args, **keywords)\n"
        "builtins.open = watched\n"
        "import ffpa_hf\n"
        "query = torch.randn(1, 1, 8, 64)\n"
        "ffpa_hf.ffpa_attn_func(query, query, query)\n"
        "print(ffpa_hf.explain(query, query, query))\n"
    )
    done = python(program, "-B", HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_can_attend():
    program = (
        "import os, torch, ffpa_hf\n"
        "torch.set_num_threads(1)\n"
        "query = torch.randn(1, 1, 8, 64)\n"
        "ffpa_hf.ffpa_attn_func(query, query, query)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    ffpa_hf.ffpa_attn_func(query, query, query)\n"
        "    os._exit(0 if not torch.cuda.is_initialized() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    done = python(program)
    assert done.returncode == 0, done.stderr


def test_everything_promised_can_be_imported_by_name():
    import ffpa_hf

    for name in ffpa_hf.__all__:
        if name != "FFPAAttnProcessor":  # beside diffusers, which is optional
            assert getattr(ffpa_hf, name) is not None
    promised = {
        "ffpa_attn_func", "ffpa_attn_varlen_func", "explain", "SDPABackend", "CUDABackend", "TritonBackend",
        "CuTeDSLBackend", "RowIntervals", "FFPAAttnProcessor", "enable", "disable", "enabled", "report", "register",
        "unregister", "FallbackWarning", "Plan",
    }  # fmt: skip
    assert promised <= set(ffpa_hf.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ffpa_hf.nothing
