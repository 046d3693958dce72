"""Empirical audit: tests whether a learner's messages keep the promised privacy."""
