"""`allreduce order=priority`: gradients leave in slices, in the order in which the next forward needs them."""
