"""`bench agent`: recovery of the device agent from kills, and its overhead."""
