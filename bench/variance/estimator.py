"""Statistics of the randomized gradient estimator in closed form: alignment, variance, and descent per step.

The estimator is the paper's (Section 2): the mean over q directions z of (g.z) z, on a batch of E examples whose
gradient is g_E; D numbers are trained. Differences are taken to be slopes (eps -> 0).
"""

import numpy as np

from bench.variance.gradients import Moments


def alignment(queries: int, size: int) -> float:
    """Returns E cos^2 between the estimate and g_E for Gaussian z: q / (D + q - 1), exact.

    The estimate is Z a, Z (D, q) the directions and a = Z^T g. Along g it is |g| times a chi-square of q degrees of
    freedom, c; across, given a, it is Gaussian of variance |a|^2 in D - 1 dimensions. So cos^2 = c / (c + c'), c' an
    independent chi-square of D - 1 degrees: Beta(q / 2, (D - 1) / 2), whose mean this is.
    """
    return queries / (size + queries - 1)


def alignment_with_mean(queries: int, size: int, batch_alignment: float) -> float:
    """Returns E cos^2 between the estimate and the many-example gradient g; batch_alignment: cos^2 of g_E and g.

    The part of the estimate across g_E is isotropic in the D - 1 other dimensions.
    """
    along = alignment(queries, size)
    return along * batch_alignment + (1 - along) * (1 - batch_alignment) / (size - 1)


def direction_variance(noise: str, queries: int, size: int) -> float:
    """Returns E |estimate - g_E|^2 / |g_E|^2: (D + 1) / q for Gaussian z, (D - 1) / q for Rademacher z."""
    return (size + (1 if noise == "gaussian" else -1)) / queries


def batch_variance(moments: Moments, examples: int) -> float:
    """Returns E |g_E - g|^2 / |g|^2."""
    return moments.noise / (examples * moments.signal)


def descent(moments: Moments, queries: int, examples: int) -> float:
    """Returns the expected decrease of the loss by one step at its best learning rate, in nats, at B = 0.

    With curvature H a step of size lr decreases the loss by lr |g|^2 - lr^2 / 2 E u^T H u, u the estimate. For Gaussian
    z, E u^T H u = (|g_E|^2 tr H + (q + 1) g_E^T H g_E) / q; the best lr leaves |g|^4 / (2 E u^T H u). H is taken to be
    F, the second moment of examples' gradients: of a softmax loss the Gauss-Newton matrix, if the model is calibrated.
    The rank of F replaces D in bounds without H (Malladi et al., 2023, Theorem 1).
    """
    squared = moments.signal + moments.noise / examples
    along = moments.along + (moments.square - moments.along) / examples
    return queries * moments.signal**2 / (2 * (squared * moments.total + (queries + 1) * along))


def means_of_runs(z: np.ndarray, slopes: np.ndarray, queries: int) -> np.ndarray:
    """Returns the estimate of each run of `queries` rows of z (n, D), slopes (n,): float64 (n / queries, D)."""
    weighted = z.astype(np.float64) * slopes[:, None]
    found: np.ndarray = weighted.reshape(len(z) // queries, queries, -1).mean(1)
    return found


def cosines_squared(estimates: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Returns cos^2 of each row of estimates (n, D) with reference (D,): (n,)."""
    found: np.ndarray = (estimates @ reference) ** 2 / ((estimates**2).sum(1) * (reference @ reference))
    return found
