"""A model cut into stages, each on a worker of its own, through which micro-batches flow."""
