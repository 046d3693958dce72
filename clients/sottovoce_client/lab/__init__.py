"""The laboratory: a gallery of attacks, services that are not ours, live monitoring, the auditor's own test."""
