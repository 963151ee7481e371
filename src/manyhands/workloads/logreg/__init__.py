"""Sparse logistic regression: two labels, as many features as a file has, updated one example at a time."""
