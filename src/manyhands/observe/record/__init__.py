"""Recording of a run: events, the rings and files that hold them, and reading them back."""
