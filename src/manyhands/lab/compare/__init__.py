"""The same task under several strategies, side by side: one table, one report."""
