"""Pages for people: the report of a run, and what all pages share."""
