"""Bytes that nobody thought of, against every parser of the proxy: each parses or refuses, and never anything else.

By hand, for longer, with what leads somewhere new kept in tests/data/corpus:
`python -m tests.proxy.fuzz [--seconds 600] [--seed N] [TARGET ...]`
"""
