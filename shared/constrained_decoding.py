"""Constrained decoding: a model writes only JSON that satisfies a schema, by masks over its vocabulary (llguidance).

As a program it compiles the schema on standard input with limits of time and memory. `check_schema` starts it, because
a small schema can take any amount of both.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import weakref
from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.errors import BadRequest
from shared.tokenizer import token_bytes

F32 = NDArray[np.float32]
MAX_SCHEMA_BYTES = 65_536
COMPILE_SECONDS = 2  # of processor time for one schema, the start of the process included
COMPILE_MEMORY = 1 << 30  # bytes of address space
WAIT_SECONDS = 30.0  # for the process, also on a machine that has other work
MAX_COMPILED = 16  # schemas that a vocabulary keeps
# Without `precompute_large_lexemes` a schema takes as long to compile for a large vocabulary as for a small one.
_LIMITS = LLParserLimits(precompute_large_lexemes=False, verbose_errors=False)


class InvalidSchema(BadRequest, status=400):
    """A JSON schema that an answer has to satisfy cannot be compiled; the message names the field and the reason."""

    def __init__(self, reason: str, field: str = "response_format") -> None:
        super().__init__(f"{field}: {reason}", errors=[{"field": field, "message": reason}])


class NoTokenAllowed(BadRequest, status=422):
    """No token continues the JSON text, or finding one takes too long; choose a simpler schema for response_format."""


def check_schema(schema: str, field: str) -> None:
    """Raises InvalidSchema unless a JSON schema compiles within the limits of size, time and memory.

    field: of the request, which has the schema.
    """
    if len(schema) > MAX_SCHEMA_BYTES:
        raise InvalidSchema(f"the schema has {len(schema)} bytes; at most {MAX_SCHEMA_BYTES} are compiled", field)
    if fault := _fault(schema):
        raise InvalidSchema(fault, field)


@lru_cache(maxsize=64)
def _fault(schema: str) -> str:
    """Returns why a schema does not compile; empty if it does."""
    command = [sys.executable, "-m", "shared.constrained_decoding"]
    try:
        process = subprocess.run(
            command, input=schema, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InvalidSchema(f"the schema was not compiled within {WAIT_SECONDS:.0f} seconds") from error
    if process.returncode != 0:
        return f"the schema takes more than {COMPILE_SECONDS} seconds or {COMPILE_MEMORY >> 20} MiB to compile"
    return process.stdout


def _compile(tokenizer: LLTokenizer, schema: str) -> LLMatcher:
    """Returns the matcher of a schema. Raises InvalidSchema."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema)
    except ValueError as error:
        raise InvalidSchema(str(error)) from error
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidSchema(matcher.get_error())
    if matcher.is_stopped():
        raise InvalidSchema("no JSON satisfies the schema")
    return matcher


class _Tokens:
    """A vocabulary as llguidance reads it. tokens: the bytes of each token."""

    bos_token_id = eos_token_id = None

    def __init__(self, vocabulary: Vocabulary, tokens: list[bytes], special_token_ids: list[int]) -> None:
        self.tokens, self.special_token_ids = tokens, special_token_ids
        # Weak, because the vocabulary owns the LLTokenizer, which owns this, and Python frees no cycle through Rust.
        self._vocabulary = weakref.proxy(vocabulary)

    def __call__(self, text: str) -> list[int]:
        """Returns tokens that spell a text, for text that a schema prescribes."""
        spelling: list[int] = self._vocabulary.tokenizer.greedy_tokenize(text)
        return spelling


class Vocabulary:
    """The tokens of one model, and the schemas that were compiled for them."""

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Collection[int]) -> None:
        """size: V, rows of the embedding table. ends: the tokens that end a text, special ones included.

        Raises InvalidSchema if there is none.
        """
        self.ends = [token for token in ends if token < size]
        if not self.ends:
            raise InvalidSchema("the base model has no token that ends a text")
        spelled = min(size, tokenizer.get_vocab_size())
        tokens = [token_bytes(tokenizer, token) for token in range(spelled)] + [b""] * (size - spelled)
        spellings = TokenizerWrapper(_Tokens(self, tokens, self.ends))
        self.tokenizer = LLTokenizer(spellings, slices=LLTokenizer.json_slices())
        tokens.clear()
        self._compiled = lru_cache(MAX_COMPILED)(_compile)

    def matcher(self, schema: str) -> LLMatcher:
        """Returns a new matcher of a schema, at its beginning. Raises InvalidSchema."""
        return self._compiled(self.tokenizer, schema).deep_copy()


class Constraint:
    """Lets one text be JSON that satisfies a schema, and end only when it does."""

    def __init__(self, vocabulary: Vocabulary, schema: str, tokens: Sequence[int] = ()) -> None:
        """tokens: those that the text has already. Raises InvalidSchema."""
        self._vocabulary, self._matcher = vocabulary, vocabulary.matcher(schema)
        self._matcher.consume_tokens(list(tokens))

    def mask(self, logits: F32) -> F32:
        """Returns the logits (V,), -inf for each token that cannot come next. Raises NoTokenAllowed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little").astype(bool)  # (V,)
        allowed[self._vocabulary.ends] = self._matcher.is_accepting()
        if not allowed.any():
            raise NoTokenAllowed
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Adds the token that was chosen. Raises NoTokenAllowed if it is not what the schema prescribes."""
        if token not in self._vocabulary.ends and not self._matcher.consume_token(token):
            raise NoTokenAllowed


def main() -> None:
    """Reads a schema and writes why it does not compile, or nothing."""
    resource.setrlimit(resource.RLIMIT_CPU, (COMPILE_SECONDS, COMPILE_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (COMPILE_MEMORY, COMPILE_MEMORY))
    try:
        _compile(LLTokenizer("byte"), sys.stdin.read())
    except InvalidSchema as error:
        reason: str = error.extra["errors"][0]["message"]
        sys.stdout.write(" ".join(reason.split())[:300])


if __name__ == "__main__":
    main()
