"""JSON that carries its format, its version and a checksum over itself.

Rules:
* Output is canonical: ASCII, sorted keys, no spaces, one newline at the end. Equal values give equal bytes.
* ``checksum`` is the SHA-256 of the canonical JSON without that field.
* ``signature`` is over the canonical JSON without checksum and signature; a signed document has a version of its own.
* Input is bounded before it is parsed (bytes, containers, values) and while it is parsed (depth, digits), and refused
  if a key appears twice or a number is not finite. The caller gets only an object whose checksum is right. A service's
  answer, which has no checksum, is read within the same bounds.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from ckptmirror.core.errors import BrokenMeta, NewerFormat

__all__ = [
    "LIMIT_BYTES",
    "MAX_DEPTH",
    "VERSION",
    "check_bounds",
    "check_plain",
    "json_object",
    "open_sealed",
    "printable",
    "seal",
]

VERSION = 1
LIMIT_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 64
_MAX_CONTAINERS = 2_000_000  # so that 64 MiB of brackets cannot become gigabytes of lists
_MAX_COMMAS = 8_000_000
_MAX_DIGITS = 40


def seal(
    format_name: str,
    fields: Mapping[str, Any],
    version: int = VERSION,
    sign: Callable[[bytes], bytes] | None = None,
) -> bytes:
    """Return the canonical bytes of ``fields`` with format, version and checksum, and with a signature if one is made.

    Raises:
        BrokenMeta: A value is not plain JSON, or the result is over ``LIMIT_BYTES``.
    """
    for key, value in fields.items():
        check_plain(value, key)
    document = {**fields, "format": format_name, "version": version}
    if sign is not None:
        document["signature"] = base64.b64encode(sign(_canonical(document))).decode("ascii")
    document["checksum"] = _checksum(document)
    data = _canonical(document) + b"\n"
    check_bounds(data)
    return data


def open_sealed(
    data: bytes,
    format_names: Collection[str],
    newest: int = VERSION,
    check_signature: Callable[[Mapping[str, Any], bytes, bytes | None], None] | None = None,
) -> dict[str, Any]:
    """Return the object in ``data``, with ``format`` and without version, checksum and signature.

    Args:
        data: The bytes of the file or object.
        format_names: The formats to accept.
        newest: The newest version of them that this ckptmirror reads; it reads all earlier ones.
        check_signature: Gets the object, the bytes that a signature is over, and the signature, if there is one; it
            raises if the object is not to be believed.

    Raises:
        BrokenMeta: The bytes are not such an object; the message says why.
    """
    document = json_object(data)
    found = document.get("format")
    if not isinstance(found, str) or found not in format_names:
        raise BrokenMeta(f"format is {_short(found)}, not {' or '.join(sorted(format_names))}.")
    version = document.pop("version", None)
    if type(version) is not int or not VERSION <= version <= newest:
        content = {key: value for key, value in document.items() if key != "checksum"}
        ours = [_checksum(content | {"version": known}) for known in range(VERSION, newest + 1)]
        damaged = document.get("checksum") in ours  # a flipped bit can turn our version into a later one
        newer = type(version) is int and version > newest and not damaged
        if newer and check_signature is not None:  # of the rest, nobody knows here what a later version means by it
            signature = _decoded(content.pop("signature", None))
            check_signature({"format": found}, _canonical(content | {"version": version}), signature)
        raise (NewerFormat if newer else BrokenMeta)(
            f"version is {_short(version)}; this ckptmirror reads version {newest}."
        )
    checksum = document.pop("checksum", None)
    for key, value in document.items():
        check_plain(value, key)
    if checksum != _checksum({**document, "version": version}):
        raise BrokenMeta(f"checksum is {_short(checksum)}, which is not that of the content.")
    signature = document.pop("signature", None)
    if check_signature is not None:
        check_signature(document, _canonical({**document, "version": version}), _decoded(signature))
    return document


def _decoded(signature: Any) -> bytes | None:
    try:
        return None if signature is None else base64.b64decode(signature, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise BrokenMeta("signature is not base64.") from error


def json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``, whatever its fields.

    Raises:
        BrokenMeta: The bytes are not one, or one that is not worth its memory; the message says why.
    """
    check_bounds(data)
    document = _parse(data)
    if not isinstance(document, dict):
        raise BrokenMeta("It is JSON, but not an object.")
    return document


def check_plain(value: Any, where: str, depth: int = 1) -> None:
    """Check that ``value`` is plain JSON, finite and not too deep.

    Raises:
        BrokenMeta: It is not; the message names the place.
    """
    if value is None or isinstance(value, str | bool):
        return
    if depth > MAX_DEPTH:
        raise BrokenMeta(f"{where[:200]} is nested more than {MAX_DEPTH} deep.")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BrokenMeta(f"{where[:200]} is {value}, which is not a finite number.")
    elif isinstance(value, int):
        if abs(value) >= 10**_MAX_DIGITS:
            raise BrokenMeta(f"{where[:200]} has more than {_MAX_DIGITS} digits.")
    elif isinstance(value, list | tuple):
        for item in value:
            check_plain(item, where, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BrokenMeta(
                    f"{where[:200]} has the key {_short(key)}, which is not text.", hint="Give plain values."
                )
            check_plain(item, f"{where}.{printable(key)}", depth + 1)
    else:
        raise BrokenMeta(
            f"{where[:200]} is a {type(value).__name__}, which JSON cannot hold.",
            hint="Give plain values: text, numbers, booleans, None, lists and dicts of them.",
        )


def printable(text: str) -> str:
    """Return the beginning of ``text`` in ASCII, always safe to print."""
    return ascii(text[:60])[1:-1]


def check_bounds(data: bytes) -> None:
    """Check, before JSON is parsed, that it is worth its memory.

    Raises:
        BrokenMeta: It is too large, or holds too many values.
    """
    if len(data) > LIMIT_BYTES:
        raise BrokenMeta(f"It has {len(data)} bytes; the limit is {LIMIT_BYTES}.")
    if data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS or data.count(b",") > _MAX_COMMAS:
        raise BrokenMeta("It holds too many values.")


def _parse(data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BrokenMeta(f"It is not UTF-8: {error.reason} at byte {error.start}.") from error
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
    except json.JSONDecodeError as error:
        raise BrokenMeta(f"It is not JSON: {error.msg} at character {error.pos}.") from error
    except RecursionError as error:
        raise BrokenMeta("It is nested too deep.") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BrokenMeta(f"The key {_short(key)} appears twice.")
            seen.add(key)
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise BrokenMeta(f"{text} is not a finite number.")


def _finite_float(text: str) -> float:
    if len(text) > 64 or not math.isfinite(number := float(text)):
        raise BrokenMeta(f"{text[:40]} is not a finite number.")
    return number


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS + 1:
        raise BrokenMeta(f"{text[:20]}... has more than {_MAX_DIGITS} digits.")
    return int(text)


def _checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(document)).hexdigest()


def _canonical(document: Mapping[str, Any]) -> bytes:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def _short(value: Any) -> str:
    """Return a short ASCII form for messages; never walks a large value."""
    if isinstance(value, str):
        return ascii(value[:60])
    return ascii(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"
