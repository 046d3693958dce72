"""A run: built from its spec, simulated, replayed, measured and recorded."""
