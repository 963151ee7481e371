"""Workers of one host that share memory: barriers, broadcast and reduction in place, by compiled kernels."""
