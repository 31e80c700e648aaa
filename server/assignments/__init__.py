"""Which adapters a device may have for its own use."""
