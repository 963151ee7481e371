"""Elastic all-reduce: workers that are lost cost at most one step, and new ones join at the border of a step."""
