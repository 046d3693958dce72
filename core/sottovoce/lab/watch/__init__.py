"""While a run goes on: tests that may be looked at every round, canaries, and what must never happen."""
