"""How much faster more workers are: measured, fitted, and forecast."""
