"""Trajectories of runs, from which the server rebuilds and verifies LoRA-B."""
