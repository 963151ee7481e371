"""The plain loop in one process: the reference for every other strategy."""
