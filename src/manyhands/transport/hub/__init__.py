"""The hub, one process's end of all its connections: framing, handshake, liveness, and shared memory for payloads."""
