"""Grants that let devices download adapters that they did not train."""
