"""Learner service: one learner of the graph, its connections to neighbours, its owner's records and its privacy ledger."""
