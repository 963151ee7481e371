"""How messages move between two roles: shared memory, torch.distributed, or a simulated network."""
