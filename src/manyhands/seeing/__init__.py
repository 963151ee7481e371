"""Views of a run directory, while the run goes on or after it: a live page, a report, metrics for other tools."""
