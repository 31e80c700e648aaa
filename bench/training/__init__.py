"""Training runs that `accuracy` and `end-to-end` compare."""
