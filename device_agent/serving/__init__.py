"""OpenAI's API on this device: HTTP, the bearer token, and the models of the adapter store."""
