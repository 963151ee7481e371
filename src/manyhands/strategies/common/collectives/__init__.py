"""Sums over workers: schedules as data, their proof, cost, picture and execution; buckets overlapped with backward."""
