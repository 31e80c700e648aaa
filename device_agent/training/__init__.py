"""Training one run: its directory and journal, its plan, the training loop and its result."""
