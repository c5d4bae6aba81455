"""diffusers: `FFPAAttnProcessor`, and what it needs to stand for any processor. Importing this imports no diffusers."""

from ffpa_hf.processors.generic import FFPAAttnProcessor

__all__ = ["FFPAAttnProcessor"]
