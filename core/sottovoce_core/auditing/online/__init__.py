"""Online checks of a run while it goes on: e-processes that may be looked at every round, and canaries."""
