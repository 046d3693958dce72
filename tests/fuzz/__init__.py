"""Hostile calls on real services."""
