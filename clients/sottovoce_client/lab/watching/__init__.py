"""`sottovoce watch`: a running deployment under anytime-valid tests, and canaries."""
