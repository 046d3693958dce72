"""Who hears whom, with which weights, round by round."""
