"""The keys of a signed run (Ed25519, RFC 8032): reads them from PEM files, and has this process use them.

Rules:
* A private key is a regular file of this user, or of root, that nobody else may read; a public one nobody else may
  change. What was opened is checked, and then read.
* A process uses one set of keys; another set is refused, since a document could be signed or believed by the wrong one.
* ``cryptography`` is imported only if there are keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmirror.core import signing
from ckptmirror.core.errors import CkptMirrorError, ConfigError
from ckptmirror.local.direct_io import open_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["use_keys"]

_LIMIT_BYTES = 64 * 1024
_MAKE_PRIVATE = "Make one: openssl genpkey -algorithm ed25519 -out run.pem (and chmod 600 run.pem)."
_MAKE_PUBLIC = "Make one: openssl pkey -in run.pem -pubout -out run.pub."


def use_keys(signing_key: str | Path | None = None, verify_keys: Iterable[str | Path] = ()) -> None:
    """Sign what this process commits, and believe only what is signed. Without arguments nothing changes.

    Args:
        signing_key: PEM file with an Ed25519 private key, for processes that save, upload or start a run.
        verify_keys: PEM files with Ed25519 public keys. A save, a list of attempts or a tombstone that none of them
            signed is treated as broken.

    Raises:
        ConfigError: A file is missing, unsafe or not such a key; or this process uses other keys already.
    """
    if isinstance(verify_keys, str | os.PathLike) or not isinstance(verify_keys, Iterable):
        raise ConfigError(
            f"verify_keys is {verify_keys!r}; it must be a list of files.", hint="Write verify_keys=[...]."
        )
    verify_keys = list(verify_keys)
    for path in (*verify_keys, *([signing_key] if signing_key is not None else [])):
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"signing_key or verify_keys has {path!r}, which is not the path of a file.")
    public = [_public_key(Path(path)) for path in verify_keys]
    private = _private_key(Path(signing_key)) if signing_key is not None else None
    if private is None and not public:
        return
    own = private.public_key() if private is not None else None
    believed = tuple(sorted(map(_text, public)))
    identity = f"{_text(own)} {' '.join(believed)}"
    if signing.current().identity not in ("", identity):
        raise ConfigError(
            "This process already uses other keys (signing_key, verify_keys).",
            hint="Give all managers of a process the same keys, or run one process for each run.",
        )
    signing.set_current(
        signing.Keys(
            sign=private.sign if private is not None else None,
            is_signed=(lambda data, signature: _is_signed(public, data, signature)) if public else None,
            identity=identity,
            verify_keys=believed,
        )
    )


def _is_signed(public: Iterable[Ed25519PublicKey], data: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    for key in public:
        try:
            key.verify(signature, data)
        except InvalidSignature:
            continue
        return True
    return False


def _private_key(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path, "signing_key", is_private=True)
    found = _parsed(lambda: load_pem_private_key(data, password=None), path, "private", _MAKE_PRIVATE)
    if not isinstance(found, Ed25519PrivateKey):
        raise ConfigError(f"signing_key {path} is a key of another kind than Ed25519.", hint=_MAKE_PRIVATE)
    return found


def _public_key(path: Path) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _read(path, "verify_keys", is_private=False)
    found = _parsed(lambda: load_pem_public_key(data), path, "public", _MAKE_PUBLIC)
    if not isinstance(found, Ed25519PublicKey):
        raise ConfigError(f"verify_keys: {path} is a key of another kind than Ed25519.", hint=_MAKE_PUBLIC)
    return found


def _parsed(parse: Any, path: Path, kind: str, hint: str) -> Any:
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm

    try:
        return parse()
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError) as error:  # TypeError: it is encrypted
        why = "is encrypted, which is not supported" if isinstance(error, TypeError) else f"holds no {kind} key in PEM"
        raise ConfigError(f"{path} {why}.", hint=hint) from error


def _read(path: Path, setting: str, *, is_private: bool) -> bytes:
    try:
        descriptor = open_regular(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{setting}: there is no {path}.", hint=_MAKE_PRIVATE if is_private else _MAKE_PUBLIC
        ) from error
    except (OSError, CkptMirrorError) as error:
        why = error.message if isinstance(error, CkptMirrorError) else f"{path} cannot be read: {error.strerror}."
        raise ConfigError(f"{setting}: {why}", hint="Name the file itself.") from error
    try:
        facts = os.fstat(descriptor)
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & (0o077 if is_private else 0o022):
            raise ConfigError(
                f"{setting}: {path} may be {'read or ' if is_private else ''}changed by others.",
                hint=f"Check that the key is yours; then, as its owner: chmod {'600' if is_private else '644'} {path}",
            )
        if facts.st_size > _LIMIT_BYTES:
            raise ConfigError(f"{setting}: {path} has {facts.st_size} bytes; no key has.")
        return os.read(descriptor, _LIMIT_BYTES)
    finally:
        os.close(descriptor)


def _text(key: Ed25519PublicKey | None) -> str:
    return key.public_bytes_raw().hex() if key is not None else "-"
