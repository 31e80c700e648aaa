"""`python -m simulation`: the same as `mobizo simulate`."""

from simulation.cli import main

if __name__ == "__main__":
    main()
