"""A run over several hosts: where a process stands in it, and how it speaks with the one that leads."""
