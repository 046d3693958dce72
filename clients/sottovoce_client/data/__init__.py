"""Data sets that have a name: downloading what their owners publish, and saying what a data set holds."""
