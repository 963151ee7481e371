"""The live processes of a parameter server: processes, links and timers around the pure cores."""
