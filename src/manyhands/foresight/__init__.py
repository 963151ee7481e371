"""Predictions without a real run: simulated runs, memory estimates, and a model's graph."""
