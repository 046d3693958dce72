"""What crosses the wire of services that are not ours, as runs that can be told apart or not."""
