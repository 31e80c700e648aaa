"""`python -m device_agent` is `mobizo-agent`."""

from device_agent.cli.main import main

main()
