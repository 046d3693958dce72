"""Broken services: what an audit of real services, and of foreign ones, finds with how many runs."""
