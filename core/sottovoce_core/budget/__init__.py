"""What a run costs in all, and which noise meets a budget: composition, calibration, the trade-off with accuracy."""
