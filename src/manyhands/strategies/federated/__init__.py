"""Federated learning: many private clients improve one model, and a server averages what they send."""
