"""The places that provide the processes of a run: this host, an external launcher or specification, or Ray."""
