"""Baselines of MobiZO: first order, MeZO, other adapters and other precisions."""
