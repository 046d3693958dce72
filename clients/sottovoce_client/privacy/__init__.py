"""Guarantees and privacy costs of runs: budgets, calibration, the trade-off, the ledger."""
