"""Schema revisions, applied by `mobizo-server init` and `run`."""
