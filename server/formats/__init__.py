"""What an adapter version is converted to: files that stock programs load, and the base with the adapter merged in."""
