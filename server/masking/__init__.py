"""Masked rounds: what devices' phases leave in the database, and the sum that comes of it."""
