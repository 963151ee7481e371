"""What a run leaves on disk, and how it is resumed from there: run directory, metrics, checkpoints."""
