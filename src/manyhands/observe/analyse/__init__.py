"""What recorded events say: totals, who is slow, explanations, timelines, and a run as one value to show."""
