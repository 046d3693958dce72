"""Faults, done to runs of real processes, and what must hold all the same: `python -m tests.faults`."""
