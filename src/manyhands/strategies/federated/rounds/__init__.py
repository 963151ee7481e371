"""Who takes part in a round, when it ends and whether it counts: decisions from events, without clocks or sockets."""
