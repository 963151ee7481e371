"""`auto`: a strategy that is chosen while the run trains."""
