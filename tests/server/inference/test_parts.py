"""The scorer's parts by themselves: bounded memory, admission, drawing of tokens, stop texts, frames."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from server.inference.admission import Admission
from server.inference.errors import ScorerBusy
from server.inference.frames import HEADER_BYTES, body_length, pack, unpack
from server.inference.lru_cache import LruCache
from shared.errors import TooManyRequests
from shared.generated_text import StopTextFilter
from shared.sampling import Sampler


def test_a_cache_keeps_what_was_used_last():
    cache, loaded_keys = LruCache(10), []

    def get(key, size, in_use=()):
        return cache.get(key, size, lambda: loaded_keys.append(key) or key.upper(), in_use)

    for key in "abc":
        assert get(key, 3) == key.upper()
    get("a", 3)
    get("d", 3)  # "b" was used longest ago
    assert cache.ordered_keys() == ["c", "a", "d"]
    assert (cache.nbytes, cache.evicted, loaded_keys) == (9, 1, ["a", "b", "c", "d"])
    get("e", 4, in_use=("c",))
    assert cache.ordered_keys() == ["c", "d", "e"]
    with pytest.raises(MemoryError):
        get("f", 4, in_use=("c", "d", "e"))
    with pytest.raises(MemoryError):
        get("g", 11)
    assert cache.ordered_keys() == ["c", "d", "e"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6))))
def test_a_cache_never_holds_more(lookups):
    cache = LruCache(12)
    for key, _ in lookups:
        cache.get(key, 1 + key % 6, lambda key=key: key, ())
        assert cache.nbytes == sum(1 + each % 6 for each in cache.ordered_keys()) <= 12
        assert cache.ordered_keys()[-1] == key


def test_what_cannot_be_made_is_not_kept():
    cache = LruCache(10)
    with pytest.raises(ZeroDivisionError):
        cache.get("a", 1, lambda: 1 / 0, ())
    assert (cache.ordered_keys(), cache.nbytes) == ([], 0)


def test_a_tenant_has_half_of_the_queue():
    admission = Admission(100)
    with admission.admitted("a", 40):
        with pytest.raises(TooManyRequests), admission.admitted("a", 20):
            pass
        with admission.admitted("b", 50):
            assert admission.waiting == 90
            with pytest.raises(ScorerBusy), admission.admitted("c", 20):
                pass
    assert admission.waiting == 0
    with admission.admitted("a", 1000):  # alone, what fits a request fits the queue
        assert admission.waiting == 1000


def test_tokens_are_drawn_by_their_chances():
    chances = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(chances).astype(np.float32)

    def shares(**options):
        sampler = Sampler(**{"temperature": 1.0, "top_p": 1.0, "seed": 4} | options)
        tokens = [sampler(logits) for _ in range(4000)]
        return np.bincount(tokens, minlength=4) / len(tokens)

    np.testing.assert_allclose(shares(), chances, atol=0.03)
    hotter = chances**0.5 / (chances**0.5).sum()
    np.testing.assert_allclose(shares(temperature=2.0), hotter, atol=0.03)
    # 0.5 + 0.3 reach 0.7; the others are never drawn.
    np.testing.assert_allclose(shares(top_p=0.7), [0.625, 0.375, 0, 0], atol=0.03)
    assert shares(top_p=0.5)[0] == 1
    assert shares(temperature=0)[0] == 1


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


@settings(deadline=None)
@given(
    text=st.text("abcé", max_size=30),
    stops=st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_its_first_stop(text, stops):
    stopping = StopTextFilter(TOKENIZER, TOKENIZER.encode("x").ids, stops)
    output = ""
    for token in TOKENIZER.encode(text).ids:
        output += stopping.push(token)
        # What was given out is never taken back.
        assert text.startswith(output)
        if stopping.stopped:
            break
    output += stopping.finish()
    # The text as it grows, character by character, until it holds a stop.
    expected = next(
        (
            text[: min(place for stop in stops if (place := text[:end].find(stop)) >= 0)]
            for end in range(len(text) + 1)
            if any(stop in text[:end] for stop in stops)
        ),
        text,
    )
    assert output == stopping.text == expected
    assert stopping.stopped == any(stop in text for stop in stops)


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9), max_size=4))
def test_frames_carry_messages(message):
    data = pack(message)
    assert body_length(data[:HEADER_BYTES]) == len(data) - HEADER_BYTES
    assert unpack(data[HEADER_BYTES:]) == message


def test_no_frame_is_endless():
    with pytest.raises(ValueError, match="frame"):
        body_length(b"\xff\xff\xff\xff")
