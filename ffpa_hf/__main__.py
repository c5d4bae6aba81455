"""`python -m ffpa_hf` is the command line. Holds nothing of its own."""

from __future__ import annotations

from ffpa_hf.cli import main

if __name__ == "__main__":
    main()
