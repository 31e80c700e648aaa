"""The server's signing keys and their rotation."""
