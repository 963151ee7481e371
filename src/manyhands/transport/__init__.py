"""How bytes move between processes: links between two of them, and the hub that serves many connections."""
