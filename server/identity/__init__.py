"""Tokens: who may do what, and for which tenant."""
