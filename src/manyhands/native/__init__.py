"""Shared memory, atomics, waiting, compiled kernels and their cache."""
