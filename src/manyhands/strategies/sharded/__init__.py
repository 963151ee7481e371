"""`sharded`: parameters, gradients and optimizer state split over the workers, gathered layer by layer."""
