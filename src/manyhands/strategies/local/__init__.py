"""Local SGD: each worker takes independent steps, and parameters are averaged periodically."""
