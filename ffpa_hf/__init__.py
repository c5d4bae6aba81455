"""ffpa_hf: fast exact attention for large head dims inside Hugging Face.

Importing this imports torch and nothing else heavy, starts no CUDA context, and offers "ffpa" to transformers and
diffusers when those load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ffpa_hf.backends import CUDABackend, CuTeDSLBackend, SDPABackend, TritonBackend
from ffpa_hf.dispatch import FallbackWarning, Plan
from ffpa_hf.functional import explain, ffpa_attn_func, ffpa_attn_varlen_func
from ffpa_hf.masks import RowIntervals
from ffpa_hf.patches import disable, enable, enabled, register, unregister
from ffpa_hf.report import Report, report

if TYPE_CHECKING:
    from ffpa_hf.processors import FFPAAttnProcessor

__version__ = "0.1.0"

__all__ = [
    "CUDABackend",
    "CuTeDSLBackend",
    "FFPAAttnProcessor",
    "FallbackWarning",
    "Plan",
    "Report",
    "RowIntervals",
    "SDPABackend",
    "TritonBackend",
    "disable",
    "enable",
    "enabled",
    "explain",
    "ffpa_attn_func",
    "ffpa_attn_varlen_func",
    "register",
    "report",
    "unregister",
]


def __getattr__(name: str) -> Any:
    if name == "FFPAAttnProcessor":  # lives beside diffusers, which is optional
        from ffpa_hf.processors import FFPAAttnProcessor

        return FFPAAttnProcessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
