"""`bench step`: what a training step costs in seconds and memory."""
