"""Parameter-server runs in virtual time: real protocol cores, modelled durations, seeded faults; docs/simulator.md."""
