"""Processes that were started externally, on one host or several: their places, group and control plane."""
