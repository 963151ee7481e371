"""How far workers may run apart, as policies: one class each, wrapped where rates follow staleness."""
