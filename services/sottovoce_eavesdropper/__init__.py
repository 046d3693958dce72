"""The eavesdropper: sits on the channels, records every byte, asks nobody."""

CAPTURE_FORMAT = "sottovoce-capture-3"
"""Of the captures that it writes."""
