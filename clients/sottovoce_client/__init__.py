"""Command line, Python client, feeders, web console and reports."""
