"""A custom training loop on several workers: `mh.join()`, and the group behind it."""
