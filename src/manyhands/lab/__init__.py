"""Experiments: comparisons, sweeps, scaling curves, benchmarks, the tour."""
