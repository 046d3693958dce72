"""Feeders: from files that grow, brokers and HTTP into a learner, each record once."""
