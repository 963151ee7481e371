"""How bytes move between two processes: links, and the hub that serves many connections."""
