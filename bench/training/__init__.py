"""Training runs that `accuracy`, `end-to-end` and `options` compare."""
