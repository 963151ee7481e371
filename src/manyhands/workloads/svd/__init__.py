"""Truncated SVD and PCA of matrices of any size: block Krylov iteration over rows that are split over workers."""
