"""Runs: started, fed, watched, summed up; on services or on the simulator."""
