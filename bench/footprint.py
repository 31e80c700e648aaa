"""`python -m bench.footprint DIR`: prints the peak resident bytes of a process that trains and scores."""

import sys
from pathlib import Path

from bench.step import footprint

if __name__ == "__main__":
    print(footprint(Path(sys.argv[1])))
