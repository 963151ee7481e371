"""How many workers train one model: one folder a strategy, found by the registry; `common/` is what several use."""
