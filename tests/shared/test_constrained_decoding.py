"""Every text that is drawn under a schema is JSON that satisfies it, by `jsonschema`; hostile schemas are refused."""

import json

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.constrained_decoding import (
    MAX_SCHEMA_BYTES,
    Constraint,
    InvalidSchema,
    NoTokenAllowed,
    Vocabulary,
    check_schema,
)
from shared.sampling import Sampler

WORDS = ['{"', '":', '"}', '",', "true", "false", "null", '": "', " {", "name", "\u00e9", "<tool>"]
SIZE = 300  # rows of the embedding table; the tokenizer has fewer
LEAF = {"type": "object", "properties": {"is": {"const": True}}, "required": ["is"], "additionalProperties": False}
SCHEMAS = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "mood": {"enum": ["warm", "dull"]},
            "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        },
        "required": ["name", "mood", "stars"],
        "additionalProperties": False,
    },
    "list": {
        "type": "array",
        "items": {"type": "number", "minimum": -2.5, "maximum": 2.5},
        "minItems": 2,
        "maxItems": 4,
    },
    "choice": {"anyOf": [{"type": "null"}, LEAF, {"type": "array", "items": LEAF, "minItems": 1, "maxItems": 2}]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "format": {"type": "string", "format": "date"},
    "reference": {
        "$ref": "#/$defs/pair",
        "$defs": {"pair": {"type": "array", "prefixItems": [LEAF, LEAF], "items": False, "minItems": 2}},
    },
    "escapes": {"enum": ['"', "\\", "\n", "\u00e9", "</tool>"]},
    "number": {"type": "integer", "exclusiveMinimum": -100, "exclusiveMaximum": 100},
}


def _choices(levels):
    """Alternatives whose product has 2 ** levels members."""
    pair = [{"properties": {f"p{level}": {"const": value} for level in range(levels)}} for value in (0, 1)]
    return {"type": "object", "allOf": [{"anyOf": pair} for _ in range(levels)]}


HOSTILE = {
    "product": _choices(24),
    "endless reference": {"$ref": "#"},
    "foreign reference": {"$ref": "https://example.org/schema.json"},
    "local file": {"$ref": "file:///etc/passwd"},
    "missing reference": {"$ref": "#/$defs/nobody"},
    "unknown type": {"type": "film"},
    "no type": {"type": 7},
    "negation": {"not": {"type": "string"}},
    "nothing": {"enum": []},
    "contradiction": {"type": "integer", "minimum": 5, "maximum": 4},
    "broken pattern": {"type": "string", "pattern": "("},
    "backreference": {"type": "string", "pattern": r"(a)\1"},
    "hours of work": {"allOf": [{"type": "number", "multipleOf": number} for number in range(2, 60)]},
}


@pytest.fixture(scope="module")
def tokenizer():
    """Every byte, and tokens that span the marks of JSON."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = ["".join(alphabet_of(word)) for word in WORDS]
    spellings = dict.fromkeys([*alphabet, *spelled])
    tokenizer = Tokenizer(models.BPE({spelling: number for number, spelling in enumerate(spellings)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<turn>"])
    return tokenizer


def alphabet_of(word):
    """A word in the characters of a byte-level vocabulary, by the library."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizer.pre_tokenize_str(word)[0][0]


@pytest.fixture(scope="module")
def ends(tokenizer):
    return [tokenizer.token_to_id("<end>"), tokenizer.token_to_id("<turn>")]


@pytest.fixture(scope="module")
def vocabulary(tokenizer, ends):
    return Vocabulary(tokenizer, SIZE, ends)


def draw(vocabulary, schema, seed, temperature=1.0, limit=2000):
    """Tokens by random logits; the last one ends the text, unless it reaches the limit."""
    random = np.random.default_rng(seed)
    sampler = Sampler(temperature, 1.0, seed, constraint=Constraint(vocabulary, json.dumps(schema)))
    tokens = []
    while len(tokens) < limit:
        tokens.append(sampler(random.normal(0, 3, SIZE).astype(np.float32)))
        if tokens[-1] in vocabulary.ends:
            break
    return tokens


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_every_text_satisfies_its_schema(vocabulary, tokenizer, name, temperature):
    for seed in range(12):
        tokens = draw(vocabulary, SCHEMAS[name], seed, temperature)
        assert tokens[-1] in vocabulary.ends
        assert not set(tokens[:-1]) & set(vocabulary.ends)
        value = json.loads(tokenizer.decode(tokens[:-1], skip_special_tokens=False))
        jsonschema.validate(value, SCHEMAS[name], format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_by_the_fields_name(name):
    with pytest.raises(InvalidSchema, match=r"^response_format: \w") as refused:
        check_schema(json.dumps(HOSTILE[name]), "response_format")
    assert refused.value.extra["errors"][0]["field"] == "response_format"
    assert len(refused.value.detail) < 400


def test_a_schema_has_a_limited_size():
    check_schema(json.dumps(SCHEMAS["choice"]), "response_format")
    with pytest.raises(InvalidSchema, match=f"at most {MAX_SCHEMA_BYTES} are compiled"):
        check_schema(json.dumps({"enum": ["x" * MAX_SCHEMA_BYTES]}), "response_format")


def test_a_text_goes_on_where_another_constraint_was(vocabulary):
    schema = json.dumps(SCHEMAS["object"])
    tokens = draw(vocabulary, SCHEMAS["object"], 3)
    logits = np.zeros(SIZE, np.float32)
    for length in range(len(tokens)):
        masked = Constraint(vocabulary, schema, tokens[:length]).mask(logits)
        assert masked[tokens[length]] == 0
        assert np.isneginf(masked).any()
    assert [token for token in vocabulary.ends if masked[token] == 0] == vocabulary.ends


def test_a_vocabulary_that_cannot_write_a_schema(tokenizer, ends):
    with pytest.raises(InvalidSchema, match="no token that ends a text"):
        Vocabulary(tokenizer, SIZE, [])
    letters = Tokenizer(models.BPE({letter: number for number, letter in enumerate('{}":ab')}, []))
    letters.decoder = decoders.ByteLevel()
    constraint = Constraint(Vocabulary(letters, 7, [6]), '{"enum": ["c"]}')
    constraint.accept(2)
    with pytest.raises(NoTokenAllowed):
        constraint.accept(int(constraint.mask(np.zeros(7, np.float32)).argmax()))
