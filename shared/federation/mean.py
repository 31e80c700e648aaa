"""The weighted mean of updates that come one by one: O(D) memory however many there are.

What is summed is float64, what goes in and comes out is float32. Knows neither files nor where updates come from.

How exact it is. Let u = 2^-53, s_i = weight_i * scale_i, and x_i be one element of update i. Each term of the sum is
rounded once as a product and at most n - 1 times as a summand, in whatever order they come, so that (Higham, Accuracy
and Stability of Numerical Algorithms, 2002, lemma 3.1 and section 4.2)

    |computed sum - sum s_i x_i| <= g(n) sum |s_i x_i|,    g(k) = k u / (1 - k u).

The sum of weights has relative error g(n), s_i itself u, the quotient u; rounding to float32 adds half a unit in the
last place: 2^-24 of the value, and 2^-150 where that is subnormal. Two orders hence differ by at most twice
`error_bound`: for 10,000 updates its first part is 2.2e-12 of the mean absolute value, far below the second.
"""

from __future__ import annotations

import numpy as np

from shared.federation.update import BLOCK, F32, F64

UNIT = 2.0**-53  # u of float64


class WeightedMean:
    """sum of weight * scale * update over sum of weight, element by element.

    scale: what is done to the update itself (clipping, staleness), which the weights' sum does not see.
    """

    def __init__(self, size: int) -> None:
        """size: D."""
        self.sums: F64 = np.zeros(size, np.float64)
        self.weight = 0.0
        self.count = 0  # updates that are in
        self._products: F64 = np.empty(min(BLOCK, size), np.float64)

    def add(self, flat: F32, weight: float = 1.0, scale: float = 1.0) -> None:
        """Takes one more update, float32 (D,). Raises ValueError for a weight that is not above zero."""
        if flat.shape != self.sums.shape:
            raise ValueError(f"an update of {flat.size} elements in a mean of {self.sums.size}")
        if not (weight > 0 and np.isfinite(weight) and np.isfinite(scale)):
            raise ValueError(f"weight {weight} and scale {scale} make no mean")
        factor = weight * scale
        for at in range(0, flat.size, BLOCK):
            block = flat[at : at + BLOCK]
            products, sums = self._products[: block.size], self.sums[at : at + BLOCK]
            np.copyto(products, block)
            if factor != 1:
                np.multiply(products, factor, out=products)
            np.add(sums, products, out=sums)
        self.weight += weight
        self.count += 1

    def result(self) -> F32:
        """The mean, float32 (D,). Raises ValueError if nothing is in it."""
        if not self.count:
            raise ValueError("the mean of no updates is not defined")
        return (self.sums / self.weight).astype(np.float32)


def error_bound(count: int, mean_absolute: F64, mean: F64) -> F64:
    """How far each element of `WeightedMean.result` may be from the true mean, float64 (D,).

    mean_absolute: sum of |weight * scale * x| over sum of weight. mean: the true mean.
    """
    roundings = 2 * count + 2
    return roundings * UNIT / (1 - roundings * UNIT) * (mean_absolute + np.abs(mean)) + np.maximum(
        2.0**-24 * np.abs(mean) * (1 + 2.0**-20), 2.0**-150
    )
