"""What would happen: simulated runs, memory estimates, a model's graph."""
