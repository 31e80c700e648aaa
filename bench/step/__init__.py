"""`bench step`: time and memory of a training step."""
