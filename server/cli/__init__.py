"""The commands of `mobizo-server`."""
