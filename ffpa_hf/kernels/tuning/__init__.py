"""What was measured and what was verified, as data: preference tables, verdicts, and the store that keeps them.

Knows files and numbers; imports no kernel.
"""
