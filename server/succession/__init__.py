"""The server's signing keys, one after the other, and how devices follow them."""
