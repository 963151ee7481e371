"""`central`: one copy of the parameters per host, and an optimizer that is spread over the workers."""
