"""Plans for the machines at hand: measured, and tried."""
