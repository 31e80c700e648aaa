"""DP sampling: the secret samples and noise of a differentially private run.

They are drawn once from the operating system's randomness before the first step and stored in the run's directory until
the run ends. A step that is repeated after a kill therefore uses the same sample and noise, and reveals nothing new. If
the number of examples has changed meanwhile, they are drawn again: recorded steps are never computed again, and a step
that was not recorded never left the training process.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np

from device_agent.executors import F32, I32
from shared.entropy import Entropy, poisson_samples
from shared.errors import InvalidDataset
from shared.privacy import MAX_SAMPLE, ExamplePrivacy, noise_keys, unit_noise

ARRAYS = ("counts", "order", "noise", "keys")  # of the file, with `examples`
TAIL = 8.0  # standard deviations; a larger sample has a probability below 1e-14


@dataclass(frozen=True)
class DPSamples:
    """counts: int32 (T,), examples per step. order: int32, their indices. noise: float32 (T, q), in whole units.

    With estimator `gradient`, q is 0, and the program draws each step's noise from `keys`, int32 (T, NOISE_KEYS, 2).
    With the other estimators `keys` has no elements.
    """

    examples: int
    counts: I32
    order: I32
    noise: F32
    keys: I32

    def sample(self, step: int) -> list[int]:
        """Returns the example indices of a step; may be empty."""
        end = int(self.counts[: step + 1].sum())
        sample: list[int] = self.order[end - int(self.counts[step]) : end].tolist()
        return sample

    def pieces(self, step: int, max_size: int) -> list[list[int]]:
        """Returns the example indices of a step for each of its calls, `max_size` at a time; at least one call."""
        sample = self.sample(step)
        return [sample[at : at + max_size] for at in range(0, len(sample), max_size)] or [[]]


def check_sample_size(privacy: ExamplePrivacy, records: int) -> None:
    """Raises InvalidDataset if a step on `records` records could exceed MAX_SAMPLE examples.

    records: of the file, whether or not they fit the task, so that the decision follows no record's content.
    """
    mean = records * privacy.sampling_rate
    if mean + TAIL * math.sqrt(mean * (1 - privacy.sampling_rate)) > MAX_SAMPLE:
        raise InvalidDataset(f"a step of this run could see over {MAX_SAMPLE} examples: ask for a lower sampling_rate")


def draw(
    privacy: ExamplePrivacy, examples: int, steps: int, queries: int | None, entropy: Entropy = os.urandom
) -> DPSamples:
    """Draws samples and noise for `steps` steps. queries: None with estimator `gradient`, which needs keys instead.

    Raises InvalidDataset if a sample exceeds MAX_SAMPLE examples.
    """
    empty = np.zeros(0, np.int64)
    samples = list(poisson_samples(steps, examples, privacy.sampling_rate, entropy)) if examples else [empty] * steps
    if max(map(len, samples)) > MAX_SAMPLE:
        raise InvalidDataset(f"a step of this run would see over {MAX_SAMPLE} examples: ask for a lower sampling_rate")
    return DPSamples(
        examples=examples,
        counts=np.array([len(sample) for sample in samples], np.int32),
        order=np.concatenate(samples).astype(np.int32),
        noise=unit_noise(privacy, steps, queries or 0, entropy),
        keys=noise_keys(steps if queries is None else 0, entropy),
    )
