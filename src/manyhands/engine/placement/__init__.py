"""Where the modules of a model compute: placed on devices by name, and seen as a graph with its cuts."""
