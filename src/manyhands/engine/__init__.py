"""The spine of a run: `fit`, the session, one worker's loop, reports, checkpoints, callbacks."""
