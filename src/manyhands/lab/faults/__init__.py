"""What faults cost: runs that are struck at a set step, beside one that is not."""
