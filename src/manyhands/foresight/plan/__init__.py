"""Which plan for which machines: predicted times, what they need, and why the others lose."""
