"""The laboratory: attacks, services that are not ours, live monitoring, the auditor's own test. Nothing else needs it."""
