"""The audit of services that are not ours."""
