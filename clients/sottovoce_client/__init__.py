"""What people hold: the command line, the Python client, feeders, the console and the report."""
