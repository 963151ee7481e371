"""Ray as the place of a run's processes: the cluster, the placement of roles, and the actors that run them."""
