"""Audit without an algorithm: captured runs of two worlds, of a foreign service or of encrypted channels."""
