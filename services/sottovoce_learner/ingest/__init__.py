"""Ingest of records from the learner's owner: logged, acknowledged, and queued for their rounds."""
