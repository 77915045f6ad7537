"""Signatures: how this process signs the documents that it writes, and whose signatures it demands.

Rules:
* A process has one set of keys, for every place that it reads or writes. So no reader can forget to ask for them.
* With verify keys, a document is believed if one of them signed it, and never otherwise. Without, all are believed.
* Nothing here knows cryptography: ``local/keys.py`` reads the keys and brings the two functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from ckptmirror.core.errors import ConfigError

__all__ = ["Keys", "cannot_sign", "check_can_sign", "current", "set_current", "signer"]


@dataclass(frozen=True, slots=True)
class Keys:
    """What a process signs and demands.

    Attributes:
        sign: Returns the signature of bytes; None: documents are not signed.
        is_signed: Whether a signature of bytes is right; None: signatures are not asked for.
        identity: The same for equal keys; "" if there are none.
        verify_keys: The public keys whose signatures it believes, as hex digits, sorted.
    """

    sign: Callable[[bytes], bytes] | None = None
    is_signed: Callable[[bytes, bytes], bool] | None = None
    identity: str = ""
    verify_keys: tuple[str, ...] = ()


_TRIAL = b"ckptmirror: is this key believed?"
_keys = Keys()


def current() -> Keys:
    """Return the keys of this process."""
    return _keys


def set_current(keys: Keys) -> Keys:
    """Use these keys from now on; return those used before."""
    global _keys
    before, _keys = _keys, keys
    return before


def check_can_sign() -> None:
    """Refuse to change a run in a process that could not read afterwards what it writes.

    Raises:
        ConfigError: It demands signatures, and has no key to sign with, or one whose signatures it does not believe.
    """
    if _keys.is_signed is None:
        return
    if _keys.sign is None:
        raise ConfigError(
            "verify_keys is set, but signing_key is not: what this process writes would not be believed.",
            hint="Set signing_key too; only what reads (stage, ls, verify, load_checkpoint) does without.",
        )
    if not _keys.is_signed(_TRIAL, _keys.sign(_TRIAL)):
        raise ConfigError(
            "No file of verify_keys is the public key of signing_key: what this process writes would not be believed.",
            hint="Add it to verify_keys, in every process of the run: openssl pkey -in run.pem -pubout -out run.pub.",
        )


def signer() -> str:
    """Name the key that this process signs with, for a comparison of the nodes of a job; "": it has none.

    With verify keys, the nodes may sign with several that all of them believe: then all have the same name. Without,
    each signs only what its own key has signed, so that two keys would never commit a save.
    """
    if _keys.sign is None:
        return ""
    if _keys.is_signed is not None:
        return "one of several"
    return f"a key with the mark {hashlib.sha256(_keys.sign(_TRIAL)).hexdigest()[:8]}"


def cannot_sign(what: str) -> ConfigError:
    """Return the error of a process without a key that would have to write something signed again, unsigned."""
    return ConfigError(
        f"{what} is signed, and this process has no signing_key: nobody who demands signatures would believe what it "
        "writes.",
        hint="Set signing_key and verify_keys (CKPTMIRROR_SIGNING_KEY, CKPTMIRROR_VERIFY_KEYS), as the trainer does.",
    )
