"""Predictions and export of a learner's model, for its owner."""
