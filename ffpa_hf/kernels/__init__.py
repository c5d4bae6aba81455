"""Implementations of attention, one folder per backend. Importing this imports none of them."""
