"""The inputs of a run and what it stores: data sets, batch plans, randomness, the run directory."""
