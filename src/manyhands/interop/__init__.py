"""Integration with user programs: custom training loops, the torch.distributed backend, DDP's comm hooks."""
