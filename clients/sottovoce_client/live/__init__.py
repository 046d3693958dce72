"""Live records into a learner and its predictions back, from Python programs."""
