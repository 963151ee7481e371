"""What a run does, recorded as it happens: events, the rings and files that hold them, and reading them back."""
