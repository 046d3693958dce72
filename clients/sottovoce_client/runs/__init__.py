"""Runs: start, feed, monitor and summarise them, on services or in the simulator."""
