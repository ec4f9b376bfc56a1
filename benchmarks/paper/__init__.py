"""Every figure of the paper, recomputed: `python -m benchmarks.paper --help`."""
