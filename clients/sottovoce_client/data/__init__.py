"""Named data sets: downloads from their publishers, and descriptions."""
