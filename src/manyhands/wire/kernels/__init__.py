"""Compiled kernels of the codecs."""
