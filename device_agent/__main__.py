"""`python -m device_agent` is `mobizo-agent`."""

from device_agent.cli import main

main()
