"""Is the noise of all messages what the algorithm says it is? One world is enough."""
