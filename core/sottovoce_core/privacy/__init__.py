"""What is promised about messages, what they cost, and the proofs behind it."""
