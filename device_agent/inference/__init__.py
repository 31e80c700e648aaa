"""Personal adapters at work on this device."""
