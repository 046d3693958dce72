"""What runs promise and cost: budgets, calibration, the trade-off, the ledger."""
