"""Shared memory on one host: segments, atomics, and waiting that never hangs silently."""
