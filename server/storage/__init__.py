"""Files, addressed by their content."""
