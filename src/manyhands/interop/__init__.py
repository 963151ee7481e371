"""Other people's programs: the user's own loop, the torch.distributed backend, DDP's communication hooks."""
