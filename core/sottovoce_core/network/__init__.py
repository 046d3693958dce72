"""Networks of a run: senders, recipients and weights of each round."""
