"""Online checks of a run while it goes on: e-processes that may be inspected every round, and canaries."""
