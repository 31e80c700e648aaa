"""Leases: each gives a job to one device for a limited time."""
