"""Backups: a consistent copy of the database, the stored files it references, and optionally the signing keys."""
