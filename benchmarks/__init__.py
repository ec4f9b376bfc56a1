"""Benchmarks of time and accuracy, and every figure of the paper. The package imports none of this."""
