"""Calibrations that the operator registered: what recipes may take A from."""
