"""The commands of `mobizo-agent`."""
