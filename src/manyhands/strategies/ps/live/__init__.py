"""The live roles of a parameter server: processes, links and clocks around the pure cores."""
