"""Base models that the operator registered."""
