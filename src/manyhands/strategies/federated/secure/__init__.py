"""Secure aggregation: a server learns the sum of what clients send, and nothing of any one of them."""
