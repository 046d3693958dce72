"""Records from the learner's owner: written down, receipted, and held for their rounds."""
