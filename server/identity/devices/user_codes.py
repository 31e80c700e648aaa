"""The codes that a person reads from a device to an operator: forty random bits, hard to get wrong.

Crockford's base32: digits and capital letters without I, L, O and U; what is read as one of the first three is taken
for the digit that it looks like. Dashes, spaces and case do not count.
"""

from __future__ import annotations

import re
import secrets

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
LENGTH = 8  # characters of five bits
_LOOKS_LIKE = str.maketrans("ILO", "110")
_CODE = re.compile(rf"[{ALPHABET}]{{{LENGTH}}}")


def new_user_code() -> str:
    """A code as it is stored."""
    return "".join(secrets.choice(ALPHABET) for _ in range(LENGTH))


def shown(code: str) -> str:
    """A stored code as people read it: WDJB-MJHT."""
    return f"{code[:4]}-{code[4:]}"


def read_user_code(text: str) -> str | None:
    """The code that a person typed, as it is stored; None if it can be none."""
    found = re.sub(r"[\s-]", "", text[:40]).upper().translate(_LOOKS_LIKE)
    return found if _CODE.fullmatch(found) else None
