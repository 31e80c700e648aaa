"""Builds of the native runner that the operator offers to devices."""
