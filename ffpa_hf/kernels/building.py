"""Was it the compiler? Tells a kernel that could not be built from one that ran and failed.

Knows where the compilers' code is, and imports none of it.
"""

from __future__ import annotations

import re

import torch

#: Modules that build kernels. Of the CUDA backend's, all but launching.
_BUILDING = re.compile(
    r"triton\.compiler(\.|$)|triton\.runtime\.build$|triton\.backends\.\w+\.compiler$|ffpa_hf\.kernels\.cuda\.program$|"
    r"ffpa_hf\.kernels\.cute\.build$"
)

#: What starts a kernel in modules that otherwise build: (module, function).
_STARTING = frozenset({("ffpa_hf.kernels.cuda.program", "launch"), ("triton.compiler.compiler", "runner")})


def is_build_failure(error: BaseException) -> bool:
    """Whether an exception comes from compiling or loading a kernel, by the code that it passed through.

    Running out of memory is none, whatever was being done, nor is anything that a started kernel did.
    """
    if not isinstance(error, Exception) or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return False
    building = False
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        building = building or _BUILDING.match(frame.f_globals.get("__name__", "")) is not None
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _STARTING:
            return False
        trace = trace.tb_next
    return building
