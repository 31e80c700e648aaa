"""Streaming weighted mean of updates in O(D) memory. Sums are float64; inputs and the result are float32.

Error bound. Let u = 2^-53, s_i = weight_i * scale_i, and x_i be one element of update i. Each term of the sum is
rounded once as a product and at most n - 1 times as a summand, in any order, so (Higham, Accuracy and Stability of
Numerical Algorithms, 2002, lemma 3.1 and section 4.2)

    |computed sum - sum s_i x_i| <= g(n) sum |s_i x_i|,    g(k) = k u / (1 - k u).

The sum of weights has relative error g(n), s_i has u, and the quotient has u. Rounding to float32 adds half a unit in
the last place: 2^-24 of the value, or 2^-150 for subnormal values. The results of two orders therefore differ by at
most twice `error_bound`. For 10,000 updates its first part is 2.2e-12 of the mean absolute value, far below the second.
"""

from __future__ import annotations

import numpy as np

from shared.federation.update import BLOCK, F32, F64

UNIT = 2.0**-53  # u of float64


class WeightedMean:
    """sum of weight * scale * update over sum of weight, elementwise.

    scale: a factor of the update itself (clipping, staleness), which does not enter the sum of weights.
    """

    def __init__(self, size: int) -> None:
        """size: D."""
        self.sums: F64 = np.zeros(size, np.float64)
        self.weight = 0.0
        self.count = 0  # number of updates added
        self._products: F64 = np.empty(min(BLOCK, size), np.float64)

    def add(self, flat: F32, weight: float = 1.0, scale: float = 1.0) -> None:
        """Adds an update, float32 (D,).

        Raises ValueError for another size or a weight that is not positive and finite.
        """
        if flat.shape != self.sums.shape:
            raise ValueError(f"the update has {flat.size} elements; the mean has {self.sums.size}")
        if not (weight > 0 and np.isfinite(weight) and np.isfinite(scale)):
            raise ValueError(f"weight {weight} and scale {scale} do not define a mean")
        factor = weight * scale
        for start in range(0, flat.size, BLOCK):
            block = flat[start : start + BLOCK]
            products, sums = self._products[: block.size], self.sums[start : start + BLOCK]
            np.copyto(products, block)
            if factor != 1:
                np.multiply(products, factor, out=products)
            np.add(sums, products, out=sums)
        self.weight += weight
        self.count += 1

    def result(self) -> F32:
        """Returns the mean, float32 (D,). Raises ValueError if no update was added."""
        if not self.count:
            raise ValueError("the mean of no updates is not defined")
        return (self.sums / self.weight).astype(np.float32)


def error_bound(count: int, mean_absolute: F64, mean: F64) -> F64:
    """Returns an upper bound on the error of each element of `WeightedMean.result`, float64 (D,).

    mean_absolute: sum of |weight * scale * x| over sum of weight. mean: the true mean.
    """
    roundings = 2 * count + 2
    return roundings * UNIT / (1 - roundings * UNIT) * (mean_absolute + np.abs(mean)) + np.maximum(
        2.0**-24 * np.abs(mean) * (1 + 2.0**-20), 2.0**-150
    )
