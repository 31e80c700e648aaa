"""The device's side of the HTTP protocol: client, server clock, retry pauses and enrollment."""
