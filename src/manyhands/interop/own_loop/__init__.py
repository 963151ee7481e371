"""Your own training loop on many workers: `mh.join()`, and what stands behind a group."""
