"""Compile a kernel without a GPU: fake tensors in, a relocatable object with a TVM-FFI function out.

The only module besides the kernels that imports the DSL; runs where the object is not on disk yet.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ffpa_hf.kernels.cute.configs import ForwardConfig

#: Name of the exported function.
SYMBOL = "ffpa_hf_cute_forward"


def compiled(config: ForwardConfig, arch: str = "sm_90a", options: str = ""):
    """The DSL's compiled function for tensors of any batch, heads, lengths and strides (last dim contiguous)."""
    os.environ.setdefault("CUTE_DSL_ARCH", arch)
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from ffpa_hf.kernels.cute import compat
    from ffpa_hf.kernels.cute.forward_sm90 import Forward

    dtype = compat.DTYPES[config.dtype]

    def tensor():
        shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), config.head_dim)
        return make_fake_tensor(
            dtype, shape, (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1), assumed_align=16
        )

    lse = make_fake_tensor(
        cutlass.Float32, tuple(cute.sym_int32() for _ in range(3)), (cute.sym_int64(), cute.sym_int64(), 1)
    )
    flags = (cutlass.Int32(1),) * 5
    return cute.compile(
        Forward(config), tensor(), tensor(), tensor(), tensor(), lse, cutlass.Float32(1.0), *flags,
        make_fake_stream(use_tvm_ffi_env_stream=True), options=f"--enable-tvm-ffi {options}".strip(),
    )  # fmt: skip


def build(config: ForwardConfig, arch: str = "sm_90a") -> bytes:
    """The object file of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        compiled(config, arch).export_to_c(str(path), SYMBOL)
        return path.read_bytes()
