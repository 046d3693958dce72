"""A learner's model, for its owner: predictions of it, and the model itself as a file."""
