"""Differential privacy of clients: bounded updates, noise, and a count of what was given away."""
