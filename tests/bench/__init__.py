"""Benchmarks, printed as figures beside their bounds: `python -m tests.bench [NAME]`."""
