#!/usr/bin/env bash
# Installs the attention packages that `ffpa-hf bench` times itself against, into the Python of $PYTHON (python3).
# They go in without their dependencies: ffpa-attn pins an older CuTe-DSL and quack than the ones beside it here, and both
# run with the newer. Linux x86-64 only. They are for benchmarks; nothing in ffpa_hf imports them.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -m pip install 'nvidia-cutlass-dsl[cu13]>=4.8,<5' 'apache-tvm-ffi>=0.1.11,<0.2' torch-c-dlpack-ext einops
"$python" -m pip install --no-deps ffpa-attn==0.2.4 flash-attn-4==4.0.0b36 quack-kernels==0.6.5 fa3-fwd==0.0.3
