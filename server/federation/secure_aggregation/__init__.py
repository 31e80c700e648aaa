"""Secure aggregation: rounds with masked updates, of which the server learns only the sum."""
