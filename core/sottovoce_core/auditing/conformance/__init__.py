"""Conformance tests of the noise in all messages against the claimed algorithm; one world is enough."""
