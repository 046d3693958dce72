"""`sottovoce transcript`: captured and simulated messages, in SQL and as summaries."""
