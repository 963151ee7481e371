"""Tensor parallelism: every worker holds a slice of every layer (of word vectors, some dimensions of each)."""
