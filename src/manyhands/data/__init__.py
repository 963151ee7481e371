"""What goes into a run and what stays of it: data sets, batch plans, randomness, the run directory."""
