"""Messages between a learner and its neighbours: connections, outbox, inbox, signatures, and who hears whom."""
