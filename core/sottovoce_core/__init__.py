"""Algorithms, privacy accounting and the audit, pure: no network, clock, log or global random state."""
