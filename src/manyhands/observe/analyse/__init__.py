"""Analysis of recorded events: totals, stragglers, explanations, timelines, and the view of a run."""
