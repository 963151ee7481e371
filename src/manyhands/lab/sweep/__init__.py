"""Many settings of one task: a grid of runs over the cores there are, that continues where it was."""
