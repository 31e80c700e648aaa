"""Shares against the example that teaches the method, Gauss's elimination, and the promise that t - 1 tell nothing."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import Untrusted
from shared.federation.secure_aggregation.shamir import PRIME, SHARE_BYTES, combine, evaluate, split, weights_at_zero

SECRETS = st.binary(min_size=32, max_size=32)


def as_share(number):
    return number.to_bytes(SHARE_BYTES, "big")


def solved_at_zero(points):
    """The constant of the polynomial through (x, y) points: Vandermonde's system by Gauss's elimination mod PRIME."""
    count = len(points)
    rows = [[pow(x, power, PRIME) for power in range(count)] + [y] for x, y in points]
    for column in range(count):
        pivot = next(at for at in range(column, count) if rows[at][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        inverse = pow(rows[column][column], -1, PRIME)
        rows[column] = [value * inverse % PRIME for value in rows[column]]
        for at in range(count):
            if at != column:
                factor = rows[at][column]
                rows[at] = [(a - factor * b) % PRIME for a, b in zip(rows[at], rows[column], strict=True)]
    return rows[0][-1]


def test_the_prime_is_one_and_the_first_over_2_to_the_256():
    # Miller and Rabin with fixed bases; every smaller candidate is shown to be composite by its own witness.
    def probably_prime(number):
        odd, twos = number - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in range(2, 40):
            value = pow(base, odd, number)
            if value in (1, number - 1):
                continue
            if all((value := value * value % number) != number - 1 for _ in range(twos - 1)):
                return False
        return True

    assert probably_prime(PRIME)
    assert not any(probably_prime(number) for number in range(2**256, PRIME))


def test_the_example_that_the_method_is_taught_with():
    # 1234 + 166 x + 94 x^2: the secret 1234, 3 of 6.
    shares = [evaluate([1234, 166, 94], point) for point in range(1, 7)]
    assert shares == [1494, 1942, 2578, 3402, 4414, 5614]
    found = combine({2: as_share(1942), 4: as_share(3402), 5: as_share(4414)})
    assert int.from_bytes(found, "big") == 1234


@settings(max_examples=30)
@given(SECRETS, st.integers(1, 9), st.integers(0, 5), st.randoms(use_true_random=False))
def test_any_t_shares_give_the_secret(secret, threshold, more, chance):
    shares = split(secret, threshold, threshold + more)
    chosen = chance.sample(range(1, threshold + more + 1), threshold)
    given = {point: shares[point - 1] for point in chosen}
    assert combine(given) == secret
    assert combine(given, weights_at_zero(chosen)) == secret
    solved = solved_at_zero([(point, int.from_bytes(share, "big")) for point, share in given.items()])
    assert solved == int.from_bytes(secret, "big")


@settings(max_examples=30)
@given(SECRETS, SECRETS, st.integers(2, 6))
def test_t_minus_one_shares_fit_any_secret(secret, other, threshold):
    shares = split(secret, threshold, threshold)
    fewer = [(point, int.from_bytes(shares[point - 1], "big")) for point in range(1, threshold)]
    # The polynomial through the other secret at 0 and all shares but one has some value at the last point: with that
    # share, the other secret would be the one.
    weights = {}
    for x, _ in [(0, 0), *fewer]:
        others = [point for point, _ in [(0, 0), *fewer] if point != x]
        above = below = 1
        for point in others:
            above, below = above * (threshold - point) % PRIME, below * (x - point) % PRIME
        weights[x] = above * pow(below, -1, PRIME) % PRIME
    last = (weights[0] * int.from_bytes(other, "big") + sum(weights[x] * y for x, y in fewer)) % PRIME
    assert combine({**{x: as_share(y) for x, y in fewer}, threshold: as_share(last)}) == other


def test_shares_of_one_secret_differ_each_time():
    assert split(bytes(32), 2, 2) != split(bytes(32), 2, 2)


def test_a_wrong_share_gives_no_or_another_secret():
    secret = random.Random(1).randbytes(32)
    shares = split(secret, 3, 3)
    given = {1: shares[0], 2: shares[1], 3: as_share((int.from_bytes(shares[2], "big") + 1) % PRIME)}
    assert combine(given) != secret
    with pytest.raises(Untrusted, match="inconsistent"):
        combine({1: as_share(PRIME - 1)})


@pytest.mark.parametrize(("secret", "threshold", "count"), [(bytes(31), 1, 1), (bytes(32), 0, 1), (bytes(32), 3, 2)])
def test_what_cannot_be_shared(secret, threshold, count):
    with pytest.raises(ValueError, match="shares of"):
        split(secret, threshold, count)
