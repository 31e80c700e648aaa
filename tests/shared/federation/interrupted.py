"""A process that aggregates, one update for each line it is given, until somebody kills it. Argument: a checkpoint."""

import sys
from pathlib import Path

import numpy as np

from shared.cohort import AggregatorSettings
from shared.federation.aggregation import Weighing, combine
from shared.federation.checkpoint import Checkpoint
from shared.federation.sources import MemorySource
from shared.federation.update import Update

COUNT, SIZE, EVERY = 25, 10_000, 3


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def source():
    rng = np.random.default_rng(0)
    return MemorySource(
        [
            Update(f"m{number:02}", rng.normal(size=SIZE).astype(np.float32), examples=number + 1)
            for number in range(COUNT)
        ]
    )


class Gated:
    """A source that says which update it is about to give, and waits for leave."""

    def __init__(self, inner):
        self._inner = inner
        self.size, self.contributions, self.identity = inner.size, inner.contributions, inner.identity

    def updates(self, first=0):
        for number, update in enumerate(self._inner.updates(first), first):
            say(number)
            sys.stdin.readline()
            yield update


def main():
    checkpoint = Checkpoint(Path(sys.argv[1]), seconds=1e9, updates=EVERY)
    found = combine(Gated(source()), AggregatorSettings(clip_norm=99.0), Weighing(by="examples"), checkpoint)
    say("done", found.count, found.weight, found.clipped, found.update.tobytes().hex())


if __name__ == "__main__":
    main()
