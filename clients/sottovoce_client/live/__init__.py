"""Live records into a learner, and its predictions out: from Python, files and brokers."""
