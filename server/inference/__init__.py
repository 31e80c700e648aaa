"""Scoring and generating on the server, for who has no device: many adapters in one batch."""
