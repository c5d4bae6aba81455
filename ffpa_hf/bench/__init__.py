"""`ffpa-hf bench`: our kernels beside torch's and the peers', in one run, with the numbers kept as JSON.

Peers are imported lazily and only here; nothing in the library imports this package.
"""
