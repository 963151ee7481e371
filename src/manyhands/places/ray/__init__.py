"""Ray as the place where the processes of a run are: which cluster, who is put where, actors that carry roles."""
