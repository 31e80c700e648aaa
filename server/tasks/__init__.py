"""The durable queue of heavy work over DBOS: requests of tasks, the workers that run them, and periodic sweeps."""
