"""What a run does, recorded as it happens: events, their totals, the live view and the table at the end."""
