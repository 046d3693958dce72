"""`sottovoce gallery`: attacks on what is overheard, in pictures."""
