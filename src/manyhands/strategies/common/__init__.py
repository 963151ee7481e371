"""What several strategies use: consistency policies, grids of workers, sharded parameters, row tables."""
