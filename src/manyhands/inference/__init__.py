"""Trained models at work: what a run's model answers, from files and from JSON."""
