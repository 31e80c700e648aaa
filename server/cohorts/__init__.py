"""Cohorts: members, rounds, updates that count, and the versions made of them."""
