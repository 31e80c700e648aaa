"""Server information, resource usage, liveness and readiness."""
