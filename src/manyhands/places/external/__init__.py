"""Processes that somebody else started, on one host or several: who each is, and its line to the one that leads."""
