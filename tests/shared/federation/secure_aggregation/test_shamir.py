"""Secret sharing against the textbook example and Gaussian elimination; t - 1 shares reveal nothing."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import Untrusted
from shared.federation.secure_aggregation.shamir import PRIME, SHARE_BYTES, combine, evaluate, split, weights_at_zero

SECRETS = st.binary(min_size=32, max_size=32)


def as_share(number):
    return number.to_bytes(SHARE_BYTES, "big")


def solve_at_zero(points):
    """Returns the constant of the polynomial through (x, y) points, by Gaussian elimination modulo PRIME."""
    count = len(points)
    rows = [[pow(x, power, PRIME) for power in range(count)] + [y] for x, y in points]
    for column in range(count):
        pivot = next(row for row in range(column, count) if rows[row][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        inverse = pow(rows[column][column], -1, PRIME)
        rows[column] = [value * inverse % PRIME for value in rows[column]]
        for row in range(count):
            if row != column:
                factor = rows[row][column]
                rows[row] = [(a - factor * b) % PRIME for a, b in zip(rows[row], rows[column], strict=True)]
    return rows[0][-1]


def test_the_textbook_example_is_reproduced():
    # 1234 + 166 x + 94 x^2: the secret 1234, 3 of 6.
    shares = [evaluate([1234, 166, 94], point) for point in range(1, 7)]
    assert shares == [1494, 1942, 2578, 3402, 4414, 5614]
    secret = combine({2: as_share(1942), 4: as_share(3402), 5: as_share(4414)})
    assert int.from_bytes(secret, "big") == 1234


@settings(max_examples=30)
@given(SECRETS, st.integers(1, 9), st.integers(0, 5), st.randoms(use_true_random=False))
def test_any_t_shares_give_the_secret(secret, threshold, extra, rng):
    shares = split(secret, threshold, threshold + extra)
    chosen = rng.sample(range(1, threshold + extra + 1), threshold)
    chosen_shares = {point: shares[point - 1] for point in chosen}
    assert combine(chosen_shares) == secret
    assert combine(chosen_shares, weights_at_zero(chosen)) == secret
    solved = solve_at_zero([(point, int.from_bytes(share, "big")) for point, share in chosen_shares.items()])
    assert solved == int.from_bytes(secret, "big")


@settings(max_examples=30)
@given(SECRETS, SECRETS, st.integers(2, 6))
def test_t_minus_1_shares_reveal_nothing(secret, other, threshold):
    shares = split(secret, threshold, threshold)
    fewer = [(point, int.from_bytes(shares[point - 1], "big")) for point in range(1, threshold)]
    # The polynomial through the other secret at 0 and all shares but one has some value at the last point: with that
    # share, the other secret would be the one.
    weights = {}
    for x, _ in [(0, 0), *fewer]:
        others = [point for point, _ in [(0, 0), *fewer] if point != x]
        numerator = denominator = 1
        for point in others:
            numerator, denominator = numerator * (threshold - point) % PRIME, denominator * (x - point) % PRIME
        weights[x] = numerator * pow(denominator, -1, PRIME) % PRIME
    last = (weights[0] * int.from_bytes(other, "big") + sum(weights[x] * y for x, y in fewer)) % PRIME
    assert combine({**{x: as_share(y) for x, y in fewer}, threshold: as_share(last)}) == other


def test_shares_of_one_secret_differ_each_time():
    assert split(bytes(32), 2, 2) != split(bytes(32), 2, 2)


def test_a_wrong_share_gives_no_or_another_secret():
    secret = random.Random(1).randbytes(32)
    shares = split(secret, 3, 3)
    wrong_shares = {1: shares[0], 2: shares[1], 3: as_share((int.from_bytes(shares[2], "big") + 1) % PRIME)}
    assert combine(wrong_shares) != secret
    with pytest.raises(Untrusted, match="inconsistent"):
        combine({1: as_share(PRIME - 1)})


@pytest.mark.parametrize(("secret", "threshold", "count"), [(bytes(31), 1, 1), (bytes(32), 0, 1), (bytes(32), 3, 2)])
def test_invalid_secrets_and_thresholds_are_rejected(secret, threshold, count):
    with pytest.raises(ValueError, match="shares of"):
        split(secret, threshold, count)
