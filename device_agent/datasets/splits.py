"""Which split a record belongs to: a keyed hash of its content, so that a record added again gets the same split."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import BadRequest

SPLITS = ("train", "validation", "test")
DIGEST_BYTES = 16
DEFAULT_SHARES, DEFAULT_SEED = (80, 10, 10), 0
_POSITION_BYTES = 8  # of the digest that decide the split


def record_bytes(record: Mapping[str, Any]) -> bytes:
    """Returns a record as JSON in UTF-8 on one line, the same for equal records: keys sorted, no spaces.

    Unlike RFC 8785 it keeps integers above 2^53, such as identifiers. Raises ValueError for what JSON or UTF-8 cannot
    express.
    """
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


@dataclass(frozen=True)
class SplitRule:
    """Percentages of train, validation and test, which sum to 100, and the seed of the hash."""

    shares: tuple[int, int, int] = DEFAULT_SHARES
    seed: int = DEFAULT_SEED

    @classmethod
    def parse(cls, text: str, seed: int) -> SplitRule:
        """Parses `80/10/10`, `80/20` (no test) or `100` (train only). Raises BadRequest."""
        parts = [int(part) for part in text.split("/")] if re.fullmatch(r"\d{1,3}(/\d{1,3}){0,2}", text) else []
        if sum(parts) != 100 or parts[0] == 0:
            raise BadRequest(f"--split {text!r} must be percentages that sum to 100, such as 80/10/10, 80/20 or 100")
        train, validation, test = (*parts, 0, 0)[:3]
        return cls((train, validation, test), seed)

    @property
    def text(self) -> str:
        """The percentages as `parse` reads them."""
        return "/".join(map(str, self.shares))

    @property
    def used(self) -> tuple[str, ...]:
        """The splits that have a share."""
        return tuple(split for split, share in zip(SPLITS, self.shares, strict=True) if share)

    def digest(self, content: bytes) -> bytes:
        """Returns the keyed hash of a record's bytes, DIGEST_BYTES long."""
        return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=b"mobizo split %d" % self.seed).digest()

    def split(self, digest: bytes) -> str:
        """Returns the split of a record by its digest, which is uniform."""
        position = int.from_bytes(digest[:_POSITION_BYTES], "big") * 100 >> (8 * _POSITION_BYTES)  # 0 to 99
        train, validation, _ = self.shares
        return SPLITS[(position >= train) + (position >= train + validation)]

    def minimum(self, split: str) -> int:
        """Returns how many records training needs in a split; without validation, a part of train is held out."""
        return 2 if split == "train" and not self.shares[1] else 1
