"""The core of a run: `fit`, the session, the worker's training loop, reports, checkpoints, callbacks."""
