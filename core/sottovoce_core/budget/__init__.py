"""Privacy cost of a run and noise for a budget: composition, calibration, and the trade-off with accuracy."""
