"""The eavesdropper: sits on the channels, records every byte, asks nobody."""
