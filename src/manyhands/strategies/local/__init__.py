"""Local SGD: each worker takes steps of its own, and parameters are averaged now and then."""
