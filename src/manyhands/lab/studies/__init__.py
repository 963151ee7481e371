"""Questions about distributed training, each answered by an experiment that anyone can repeat."""
