"""Recompute every figure of the paper: see `python -m benchmarks.paper --help`."""
