"""Web console: a read-only page with the runs of a coordinator, for an operator."""
