"""`bench agent`: what the device agent survives and what it costs."""
