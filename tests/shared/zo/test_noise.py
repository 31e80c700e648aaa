"""The noise reference against published vectors and against a second implementation in plain integers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import Conflict
from shared.zo import noise

# Random123 (Salmon et al., SC'11), kat_vectors, rows "threefry2x32 20": counter, key, result.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]

words = st.integers(0, 2**32 - 1)


def plain_threefry(key, counter):
    """Threefry-2x32-20 in Python integers, straight from the paper's definition."""
    mask = 0xFFFFFFFF
    keys = [key[0] & mask, key[1] & mask, 0x1BD11BDA ^ (key[0] & mask) ^ (key[1] & mask)]
    x, y = (counter[0] + keys[0]) & mask, (counter[1] + keys[1]) & mask
    for r in range(20):
        rotation = [13, 15, 26, 6, 17, 29, 16, 24][r % 8]
        x = (x + y) & mask
        y = ((y << rotation) | (y >> (32 - rotation))) & mask
        y ^= x
        if r % 4 == 3:
            s = r // 4 + 1
            x = (x + keys[s % 3]) & mask
            y = (y + keys[(s + 1) % 3] + s) & mask
    return x, y


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_threefry_known_answers(counter, key, expected):
    x0, x1 = noise.threefry2x32(key, *counter)
    assert (int(x0[0]), int(x1[0])) == expected


@given(words, words, words, words)
def test_threefry_matches_plain_integers(k0, k1, c0, c1):
    x0, x1 = noise.threefry2x32((k0, k1), c0, c1)
    assert (int(x0[0]), int(x1[0])) == plain_threefry((k0, k1), (c0, c1))


def test_signed_and_unsigned_key_words_are_the_same_key():
    unsigned = noise.threefry2x32((0xFFFFFFFE, 0x80000000), 5, 6)
    signed = noise.threefry2x32((-2, -(2**31)), 5, 6)
    assert [int(word[0]) for word in unsigned] == [int(word[0]) for word in signed]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_rademacher_takes_64_signs_a_call_low_word_and_low_bit_first(size):
    seed = (123456789, -987654321)
    z = noise.rademacher(seed, size)
    assert z.shape == (size,)
    assert z.dtype == np.float32
    for element in {0, 1, 31, 32, 33, 63, 64, size - 1}:
        if element < size:
            word = plain_threefry(seed, (element // 64, 0))[element % 64 // 32]
            assert z[element] == (-1.0 if word >> (element % 32) & 1 else 1.0)


def test_gaussian_is_box_muller_of_the_two_words():
    seed = (7, 11)
    z = noise.gaussian(seed, 101)
    assert z.shape == (101,)
    for call in range(50):
        w0, w1 = plain_threefry(seed, (call, 0))
        u1, u2 = ((w0 >> 8) + 1) / 2**24, (w1 >> 8) / 2**24
        radius = math.sqrt(-2 * math.log(u1))
        assert z[2 * call] == pytest.approx(radius * math.cos(2 * math.pi * u2), abs=2e-6)
        assert z[2 * call + 1] == pytest.approx(radius * math.sin(2 * math.pi * u2), abs=2e-6)


def test_direction_selects_the_noise_and_rejects_randn():
    assert np.array_equal(noise.direction("rademacher", (1, 2), 70), noise.rademacher((1, 2), 70))
    for name in ("gaussian", "operator"):
        assert np.array_equal(noise.direction(name, (1, 2), 70), noise.gaussian((1, 2), 70))
    with pytest.raises(Conflict, match="'randn' cannot be reproduced"):
        noise.direction("randn", (1, 2), 70)


def test_query_seeds_differ_by_job_step_and_query_and_never_move():
    seeds = {
        tuple(seed) for job in (0, 1, 2**40) for step in range(20) for seed in noise.query_seeds(job, step, 4).tolist()
    }
    assert len(seeds) == 3 * 20 * 4
    assert np.array_equal(
        noise.query_seeds(5, 3, 8)[:4], noise.query_seeds(5, 3, 4)
    )  # independent of the number of queries
    key = plain_threefry((5, 0), (noise.DOMAIN_QUERY, 0xFFFFFFFF))
    expected = np.array(plain_threefry(key, (3, 2)), np.uint32).view(np.int32)
    assert np.array_equal(noise.query_seeds(5, 3, 4)[2], expected)


@given(st.integers(0, 2**53 - 1), st.integers(0, 30), st.integers(1, 9))
def test_the_seeds_of_a_run_are_those_of_its_steps_to_the_bit(seed, steps, queries):
    seeds = noise.run_seeds(seed, steps, queries)
    assert (seeds.shape, seeds.dtype) == ((steps, queries, 2), np.int32)
    for step in range(steps):
        assert np.array_equal(seeds[step], noise.query_seeds(seed, step, queries))


@given(st.integers(0, 2**53 - 1), st.integers(0, 1000), st.integers(1, 300))
def test_permutation_is_a_permutation(seed, epoch, size):
    assert sorted(noise.permutation(seed, epoch, size).tolist()) == list(range(size))


def test_uniform_spans_its_interval_on_the_grid():
    u = noise.uniform((3, 4), 100_001)
    assert u.shape == (100_001,)
    assert u.min() >= -1
    assert u.max() < 1
    assert u.var() == pytest.approx(1 / 3, abs=0.01)
    assert np.array_equal(u * 2**23, np.round(u * 2**23))
