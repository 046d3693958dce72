"""The laboratory: the auditor's own test and its power, and a gallery of attacks. No other package imports it."""
