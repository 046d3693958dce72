"""Versions of Sottovoce beside each other."""
