"""`central`: one copy of the parameters per host, with the optimizer sharded over the workers."""
