"""`sottovoce watch`: online tests of a capture while it is written, and the canaries of a run."""
