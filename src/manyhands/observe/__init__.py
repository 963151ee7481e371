"""Observability of a run: recording its events, analysing them, and drawing the results."""
