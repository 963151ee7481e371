"""Module placement: modules on devices by name, and the model as a graph with its cuts."""
