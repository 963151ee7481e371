"""Elastic all-reduce: a lost worker costs at most one step, and new workers join at a step boundary."""
