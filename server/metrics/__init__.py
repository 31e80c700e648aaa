"""What an operator's Prometheus is told: what this process does, and what the database holds."""
