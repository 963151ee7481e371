"""HOGWILD!: one copy of the parameters in shared memory, which every worker updates without locks."""
