"""Gradient boosting of decision trees on histograms: rows split over workers, the same trees for any number of them."""
