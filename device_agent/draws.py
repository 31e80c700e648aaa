"""What a private run draws in secret: which examples are in each step, and the noise of each step's sums.

Drawn once, from the operating system's randomness, before the first step, and kept in the run's directory (as secret as
the data that lies beside it) until the run is done. So a step that a kill has undone is made again from the same
sample with the same noise: of each step one answer exists, whether or not it was written down in time. Knows no
runtime.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from device_agent.durable import write_durably
from device_agent.errors import ChangedData
from shared.entropy import Entropy, poisson_samples
from shared.errors import InvalidDataset
from shared.privacy import MOST_SAMPLE, ExamplePrivacy, unit_noise

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Draws:
    """counts: int32 (T,), the examples of each step. order: int32, their indices. noise: float32 (T, q), units."""

    examples: int
    counts: NDArray[np.int32]
    order: NDArray[np.int32]
    noise: F32

    def sample(self, step: int) -> list[int]:
        """The indices of a step's examples; it may be empty."""
        end = int(self.counts[: step + 1].sum())
        sample: list[int] = self.order[end - int(self.counts[step]) : end].tolist()
        return sample


def draw(privacy: ExamplePrivacy, examples: int, steps: int, queries: int, entropy: Entropy = os.urandom) -> Draws:
    """All that a run of `steps` steps draws for so many examples. Raises InvalidDataset if these are too many."""
    samples = list(poisson_samples(steps, examples, privacy.sampling_rate, entropy))
    if max(map(len, samples)) > MOST_SAMPLE:
        raise InvalidDataset(f"a step of this run would see over {MOST_SAMPLE} examples: ask for a lower sampling_rate")
    return Draws(
        examples=examples,
        counts=np.array([len(sample) for sample in samples], np.int32),
        order=np.concatenate(samples).astype(np.int32),
        noise=unit_noise(privacy, steps, queries, entropy),
    )


def kept_draws(path: Path, privacy: ExamplePrivacy, examples: int, steps: int, queries: int) -> Draws:
    """The draws kept at `path`, made and kept there if there are none.

    Raises ChangedData if they are of another number of examples, InvalidDataset.
    """
    if not path.exists():
        made = draw(privacy, examples, steps, queries)
        buffer = io.BytesIO()
        np.savez(buffer, examples=np.array(examples), counts=made.counts, order=made.order, noise=made.noise)
        write_durably(path, buffer.getvalue())
        return made
    with np.load(path, allow_pickle=False) as file:
        found = Draws(int(file["examples"]), file["counts"], file["order"], file["noise"])
    if found.examples != examples or found.noise.shape != (steps, queries):
        raise ChangedData
    return found
