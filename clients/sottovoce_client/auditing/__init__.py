"""`sottovoce audit`: sources of runs, output and files; and the audit of foreign services."""
