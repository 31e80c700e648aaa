"""Generated tokens as text that ends at stop texts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.generated_text import StopTextFilter
from tests.shared.test_text_stream import byte_level

TOKENIZER = byte_level()


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
