"""Histories: the trajectories of runs, with which the server makes B again as it was after any step."""
