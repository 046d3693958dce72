"""Feeders: from growing files, brokers and HTTP into a learner, each record once."""
