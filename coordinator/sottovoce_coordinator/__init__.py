"""Coordinator: distributes the topology and the round clock; it is never in the data path."""
