"""The methods of a program as modules to export: training steps, estimators, noise, inference."""
