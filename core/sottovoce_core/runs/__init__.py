"""A run: built from its spec, simulated, replayed, measured, written down."""
