"""What is trained: built-in tasks and the compiled workloads; one folder each."""
