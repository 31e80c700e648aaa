"""`bench federation`: the cost of aggregation, secure aggregation, simulation and privacy, and their benefit."""
