"""Cohorts: members, rounds, updates, and the adapter versions aggregated from them."""
