"""Idempotency keys: a request that is retried with the same key gets the stored response of its first execution."""
