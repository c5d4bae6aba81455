"""The SDPA backend: torch's own `scaled_dot_product_attention`, and chunked plain torch for what that lacks.

Runs on any device and outside any operator of ours, so autograd, torch.compile and function modes see F.sdpa itself.
"""

from __future__ import annotations

from ffpa_hf.kernels.common import Accepted, Answer
from ffpa_hf.kernels.sdpa.run import backward, forward

__all__ = ["backward", "forward", "supports"]


def supports(call, config=None, *, backward: bool = False) -> Answer:
    """SDPA serves every legal call; the note says by which of its two routes."""
    lacking = call.sdpa_composite()
    if lacking is None:
        return Accepted("F.scaled_dot_product_attention")
    return Accepted(f"chunked plain torch, since F.scaled_dot_product_attention cannot give {lacking}")
