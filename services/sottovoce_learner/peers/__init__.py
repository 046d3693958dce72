"""Messages between a learner and its neighbours: connections, outbox, inbox, signatures, and the neighbours of each round."""
