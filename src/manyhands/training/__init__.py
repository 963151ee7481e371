"""The course of a run, whatever the strategy: the request, one worker's loop and reports, and `Training`."""
