"""Calibrations that the operator registered, from which recipes may take A."""
