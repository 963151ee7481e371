"""Workers in a grid of data × stages × slices, and the groups along its axes."""
