"""The coordinator: distributes the topology and the round clock; never in the data path."""
