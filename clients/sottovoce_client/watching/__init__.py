"""`sottovoce watch`: online checks of a capture while it is recorded, and the canaries of a run."""
