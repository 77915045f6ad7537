"""Typed fields of a parsed JSON object: each is taken once, and each refusal names the field and the reason.

Rules:
* ``bool`` does not pass for ``int``. Text is bounded. Ids are lower-case hex.
* :meth:`Fields.end` refuses fields that were not taken, so an unknown key never passes silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptmirror.core.errors import BrokenMeta

__all__ = ["Fields"]

_MAX_TEXT = 4096
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Fields:
    """The fields of one object.

    Args:
        document: What the parser returned; anything but an object is refused.
        where: Names the object in messages: "" at the top, otherwise for example ``artifacts[3]``.
    """

    def __init__(self, document: Any, where: str = "") -> None:
        if not isinstance(document, dict):
            raise BrokenMeta(f"{where or 'it'} is {_type_of(document)}, not an object.")
        self._left = dict(document)
        self._where = where

    def name(self, key: str) -> str:
        """Return the full name of a field, for messages."""
        return f"{self._where}.{key}" if self._where else key

    def refuse(self, key: str, reason: str) -> BrokenMeta:
        """Return the error that says why a field is refused."""
        return BrokenMeta(f"{self.name(key)} {reason}.")

    def has(self, key: str) -> bool:
        """Whether the object has this field and it was not taken yet."""
        return key in self._left

    def value(self, key: str) -> Any:
        """Take a field of any type."""
        if key not in self._left:
            raise self.refuse(key, "is missing")
        return self._left.pop(key)

    def integer(self, key: str, low: int, high: int) -> int:
        """Take an integer from ``low`` to ``high``, both included."""
        value = self.value(key)
        if type(value) is not int:
            raise self.refuse(key, f"is {_type_of(value)}, not an integer")
        if not low <= value <= high:
            raise self.refuse(key, f"is {value}, not between {low} and {high}")
        return value

    def text(self, key: str, max_length: int = _MAX_TEXT) -> str:
        """Take text of at most ``max_length`` characters, without control characters."""
        value = self.value(key)
        if not isinstance(value, str):
            raise self.refuse(key, f"is {_type_of(value)}, not text")
        if len(value) > max_length:
            raise self.refuse(key, f"is longer than {max_length} characters")
        if not value.isprintable():
            raise self.refuse(key, "has characters that cannot be printed")
        return value

    def text_or_none(self, key: str, max_length: int = _MAX_TEXT) -> str | None:
        """Take text, or None."""
        if key in self._left and self._left[key] is None:
            self._left.pop(key)
            return None
        return self.text(key, max_length)

    def id(self, key: str) -> str:
        """Take an id of 32 hex digits."""
        value = self.value(key)
        if not isinstance(value, str) or not _ID.fullmatch(value):
            raise self.refuse(key, "is not an id of 32 hex digits")
        return value

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        """Take True or False; if the field is missing, return ``default`` if one is given."""
        if default is not None and key not in self._left:
            return default
        value = self.value(key)
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {_type_of(value)}, not true or false")
        return value

    def array(self, key: str, max_items: int) -> list[Any]:
        """Take a list of at most ``max_items``."""
        value = self.value(key)
        if not isinstance(value, list):
            raise self.refuse(key, f"is {_type_of(value)}, not a list")
        if len(value) > max_items:
            raise self.refuse(key, f"has {len(value)} items; the limit is {max_items}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Take an object as it is."""
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.refuse(key, f"is {_type_of(value)}, not an object")
        return value

    def end(self) -> None:
        """Refuse fields that were not taken."""
        if self._left:
            unknown = ascii(min(self._left)[:60])
            raise BrokenMeta(f"{self._where or 'it'} has the unknown field {unknown}.")


def _type_of(value: Any) -> str:
    names: Mapping[type, str] = {
        type(None): "null", bool: "a boolean", int: "an integer", float: "a number",
        str: "text", list: "a list", dict: "an object",
    }  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")
