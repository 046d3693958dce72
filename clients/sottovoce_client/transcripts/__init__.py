"""`sottovoce transcript`: what was overheard or simulated, in SQL and for people."""
