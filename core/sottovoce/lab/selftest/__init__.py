"""The auditor under test: broken learners, and correct ones."""
