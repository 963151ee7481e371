"""Pipeline parallelism: each worker holds some consecutive layers, and micro-batches pass through the workers."""
