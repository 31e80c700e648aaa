"""Leases: a job in one device's hands for a while."""
