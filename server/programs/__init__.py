"""Programs: one for each recipe, compiled by worker processes."""
