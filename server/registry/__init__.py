"""The registry of adapters and their immutable versions."""
