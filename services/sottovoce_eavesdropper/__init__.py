"""Eavesdropper: records the traffic of learners' channels."""

CAPTURE_FORMAT = "sottovoce-capture-3"
"""Format of the captures that this version writes."""
