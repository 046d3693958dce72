"""The algorithms: pure state machines behind one seam, `sottovoce.machine.Algorithm`."""
