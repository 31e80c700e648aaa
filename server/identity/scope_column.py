"""The column type of a token's scopes: their words, sorted, with spaces between."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Dialect, Text
from sqlalchemy.types import TypeDecorator

from shared.access import Scope

_KNOWN = {str(scope): scope for scope in Scope}


class ScopeWords(TypeDecorator[frozenset[Scope]]):
    """A set of scopes as text. A word that this version does not know allows nothing."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: frozenset[Scope] | None, dialect: Dialect) -> str | None:
        """The words."""
        return None if value is None else " ".join(sorted(value))

    def process_result_value(self, value: Any | None, dialect: Dialect) -> frozenset[Scope] | None:
        """The scopes again."""
        return None if value is None else frozenset(_KNOWN[name] for name in value.split() if name in _KNOWN)
