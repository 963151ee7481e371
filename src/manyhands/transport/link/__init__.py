"""Links, which move messages between two roles: over shared memory, TCP, torch.distributed or a simulation."""
