"""Backups: a database as it was at one moment, every file that it names, and the signing keys if wanted."""
