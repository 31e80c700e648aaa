"""Training one run: its directory and trajectory, its plan, the training loop and its result."""
