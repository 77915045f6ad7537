"""Values to JSON bytes and back: the meta, the tombstone, the list of attempts.

Rules:
* Input is checked completely before any of it is used; output passes the same checks before it is returned.
* Unknown keys are refused; free content goes under ``fields``, ``metrics`` and ``training_config``.
* A file's crc32c is the combination of its blocks'.
* Where signatures are demanded, a staged copy is believed too: its meta carries the signed one, and is a part of it. On
  a mirror none is: it may lack files, and a save there is whole.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from ckptmirror.core import names, signing
from ckptmirror.core.crc import combine_blocks
from ckptmirror.core.errors import BrokenMeta, NotSigned
from ckptmirror.core.field_checks import Fields
from ckptmirror.core.meta_checks import check_meta
from ckptmirror.core.model import (
    ALL_NODES,
    KINDS,
    MAX_BLOCKS,
    MIN_BLOCK_SIZE_BYTES,
    SIGNS,
    Artifact,
    Attempt,
    AttemptHealth,
    AttemptList,
    Digest,
    Kind,
    Meta,
    Requirement,
    SaveRef,
    Tombstone,
)
from ckptmirror.core.sealed_json import LIMIT_BYTES, VERSION, json_object, open_sealed, printable, seal

__all__ = [
    "attempts_from_bytes",
    "attempts_to_bytes",
    "health_from_bytes",
    "health_to_bytes",
    "is_signed",
    "meta_from_bytes",
    "meta_or_tombstone_from_bytes",
    "meta_to_bytes",
    "part_from_bytes",
    "tombstone_to_bytes",
]

MAX_ARTIFACTS = 1_000_000
MAX_ATTEMPTS = 100_000
_MAX_RANKS = 10_000_000
_MAX_NUMBER = 9 * 10**18  # that of a save is about eight times its step
_MAX_SIZE_BYTES = 2**62
_MAX_BLOCK_SIZE_BYTES = 2**50
_MAX_METRICS = 10_000
_MAX_URL = 4096

_META = "ckptmirror-meta"
_TOMBSTONE = "ckptmirror-tombstone"
_ATTEMPTS = "ckptmirror-attempts"
_ATTEMPTS_VERSION = 2  # ckptmirror 0.1.0 wrote 1, which lacks requirements and completed, and less of each attempt
_HEALTH = "ckptmirror-health"
_HEALTH_KEPT = 256  # attempts: enough for any row of starts that fail
_MAX_SIGNS = 64
_SIGNED = 1  # added to the version of a document with a signature, or with a proof
_HASH_BYTES = 32
_MAX_MIRRORS = 1000

# -- meta ---------------------------------------------------------------------------------------------------


def meta_to_bytes(meta: Meta) -> bytes:
    """Return the one JSON form of ``meta``.

    Raises:
        BrokenMeta: It could not be read back: a value is not plain (see :mod:`ckptmirror.core.plain_values`), or the
            meta contradicts itself.
    """
    document = {field.name: getattr(meta, field.name) for field in dataclasses.fields(meta)}
    document["attempt"] = _attempt_document(meta.attempt)
    document["kinds"] = list(meta.kinds)
    document["artifacts"] = [_artifact_document(artifact) for artifact in meta.artifacts]
    for name in ("training_config", "metrics", "fields"):
        document[name] = dict(document[name])
    if meta.staged_from is None:
        del document["partial"]  # a save is all of itself
    if meta.staged_from is None or signing.current().sign is not None or not meta.proof:
        del document["proof"]  # it is for a copy that somebody without the key made
    return _sealed(_META, document, _meta_from_fields)


def meta_from_bytes(data: bytes) -> Meta:
    """Read a meta.

    Raises:
        BrokenMeta: It is not valid; names the field and the reason.
    """
    _, fields = _opened(data, _META)
    return _provable(_meta_from_fields(fields), data)


def part_from_bytes(data: bytes) -> Meta:
    """Read the part of a node, which this process is about to merge with others, and to sign.

    So what nobody signed must not pass: without verify keys, only what this process's own key has signed is believed.

    Raises:
        BrokenMeta: It is not valid.
        NotSigned: It is not signed so.
    """
    sign = signing.current().sign
    if sign is None or signing.current().is_signed is not None:
        return meta_from_bytes(data)

    def check(_: Mapping[str, Any], content: bytes, signature: bytes | None) -> None:
        if signature is None:
            raise NotSigned(
                "It is not signed, and this process would sign the whole save.",
                hint="If no node of this job wrote it, delete it, then `ckptmirror retry` on each node.",
            )
        if signature != sign(content):  # Ed25519 gives equal bytes one signature (RFC 8032)
            raise NotSigned(
                "It is signed by another key than the signing_key of this process, which would sign the whole save. If "
                "both are yours, set verify_keys (CKPTMIRROR_VERIFY_KEYS) to the public keys of both.",
                hint="Set verify_keys to the public keys of both, then `ckptmirror retry` or `ckptmirror drain`.",
            )

    document = open_sealed(data, (_META,), VERSION + _SIGNED, check)
    del document["format"]
    return _provable(_meta_from_fields(Fields(document)), data)


def meta_or_tombstone_from_bytes(data: bytes) -> Meta | Tombstone:
    """Read the object under a meta's name on a mirror.

    Raises:
        BrokenMeta: It is neither.
    """
    format_name, fields = _opened(data, _META, _TOMBSTONE)
    if format_name == _TOMBSTONE:
        return _tombstone_from_fields(fields)
    meta = _meta_from_fields(fields)
    if meta.staged_from is not None and signing.current().is_signed is not None:
        raise NotSigned(
            "It is the meta of a copy, which may lack files of the save.",
            hint="Name the mirror that the copy came from; a directory that `stage` filled is read by its path.",
        )
    return _provable(meta, data)


def _meta_from_fields(fields: Fields) -> Meta:
    nodes = fields.integer("nodes", 1, _MAX_RANKS)
    staged_from = fields.text_or_none("staged_from")
    meta = Meta(
        run_id=fields.id("run_id"),
        attempt=_attempt(Fields(fields.value("attempt"), "attempt")),
        step=fields.integer("step", 0, names.MAX_STEP),
        save_id=fields.id("save_id"),
        save_number=fields.integer("save_number", 1, _MAX_NUMBER),
        kinds=_kinds(fields, "kinds"),
        world_size=fields.integer("world_size", 1, _MAX_RANKS),
        nodes=nodes,
        node=fields.integer("node", ALL_NODES if nodes > 1 else 0, nodes - 1),
        artifacts=tuple(
            _artifact(Fields(item, f"artifacts[{index}]"))
            for index, item in enumerate(fields.array("artifacts", MAX_ARTIFACTS))
        ),
        tag=fields.text("tag", 8),
        training_config=fields.mapping("training_config"),
        architecture_hash=fields.text_or_none("architecture_hash", 256),
        metrics=_metrics(fields),
        fields=fields.mapping("fields"),
        created_at_utc=fields.text("created_at_utc", 64),
        staged_from=staged_from,
        partial=fields.boolean("partial", default=staged_from is not None),
        proof=_long_text(fields, "proof") if fields.has("proof") else "",
    )
    fields.end()
    check_meta(meta)
    _check_hashes(meta)
    if meta.proof:
        _check_proof(meta)
    return meta


def _long_text(fields: Fields, key: str) -> str:
    value = fields.value(key)
    if not isinstance(value, str) or not value.isascii() or not 0 < len(value) <= LIMIT_BYTES:
        raise fields.refuse(key, "is not ASCII text")
    return value


def _check_hashes(meta: Meta) -> None:
    """Refuse a meta that tells nothing but crc32c of its files, where signatures are demanded."""
    if signing.current().is_signed is None:
        return
    for artifact in meta.artifacts:
        if len(artifact.digest.hashes) != len(artifact.digest.blocks):
            raise NotSigned(
                f"It has no SHA-256 of {artifact.path[:80]!a}, so its signature says nothing about the bytes."
            )


def _provable(meta: Meta, data: bytes) -> Meta:
    """Return a meta that was believed for its own signature with the bytes that prove it."""
    if signing.current().is_signed is None or meta.proof:
        return meta
    return dataclasses.replace(meta, proof=data.decode())


def _check_proof(meta: Meta) -> None:
    """Refuse a staged copy's meta that is not a part of the signed one that it carries."""
    if signing.current().is_signed is None:
        return
    _, fields = _opened(meta.proof.encode(), _META)
    if fields.has("proof"):
        raise NotSigned("Its proof is a copy's meta, too.")
    signed = _meta_from_fields(fields)
    as_signed = dataclasses.replace(
        meta, kinds=signed.kinds, artifacts=signed.artifacts, tag=signed.tag, staged_from=None, partial=signed.partial
    )
    of_path = {names.untagged(artifact.path): artifact for artifact in signed.artifacts}
    for artifact in meta.artifacts:
        there = of_path.get(names.untagged(artifact.path))
        if there is None or (artifact.digest, artifact.rank) != (there.digest, there.rank):
            raise NotSigned(f"It names {artifact.path[:80]!a} with other contents than the signed meta.")
        if set(artifact.kinds) != set(there.kinds) & set(meta.kinds):
            raise NotSigned(f"It says that {artifact.path[:80]!a} is of another kind than the signed meta.")
    if as_signed != signed or not set(meta.kinds) <= set(signed.kinds):
        raise NotSigned("It differs from the signed meta that it was made from.")
    if not meta.partial and (len(meta.artifacts), len(meta.kinds)) != (len(signed.artifacts), len(signed.kinds)):
        raise NotSigned("It lacks files of the signed meta, and does not say so.")


def _metrics(fields: Fields) -> dict[str, float]:
    metrics = fields.mapping("metrics")
    if len(metrics) > _MAX_METRICS:
        raise fields.refuse("metrics", f"has {len(metrics)} items; the limit is {_MAX_METRICS}")
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BrokenMeta(f"metrics.{printable(name)} is not a finite number.")
    return metrics


# -- artifacts ----------------------------------------------------------------------------------------------


def _artifact_document(artifact: Artifact) -> dict[str, Any]:
    digest = artifact.digest
    try:
        blocks = base64.b64encode(struct.pack(f">{len(digest.blocks)}I", *digest.blocks)).decode("ascii")
    except struct.error as error:
        raise BrokenMeta(f"A block of {artifact.path[:80]!a} has a crc32c that is not a 32-bit number.") from error
    hashes = base64.b64encode(b"".join(digest.hashes)).decode("ascii")
    return {
        "path": artifact.path,
        "kinds": list(artifact.kinds),
        "rank": artifact.rank,
        "object": artifact.object,
        "size_bytes": digest.size_bytes,
        "crc32c": digest.crc32c,
        "block_size_bytes": digest.block_size_bytes,
        "blocks": blocks,
        **({"sha256": hashes} if hashes else {}),
    }


def _artifact(fields: Fields) -> Artifact:
    rank = fields.value("rank")
    if rank is not None and (type(rank) is not int or not 0 <= rank < _MAX_RANKS):
        raise fields.refuse("rank", "is neither null nor a rank")
    path, stored = fields.text("path", 1024), fields.text_or_none("object", 1024)
    if stored == path:
        raise fields.refuse("object", "repeats the path; null says the same")
    artifact = Artifact(path=path, kinds=_kinds(fields, "kinds"), rank=rank, digest=_digest(fields), object=stored)
    fields.end()
    return artifact


def _digest(fields: Fields) -> Digest:
    size = fields.integer("size_bytes", 0, _MAX_SIZE_BYTES)
    block_size = fields.integer("block_size_bytes", MIN_BLOCK_SIZE_BYTES, _MAX_BLOCK_SIZE_BYTES)
    if block_size & (block_size - 1):
        raise fields.refuse("block_size_bytes", f"is {block_size}, not a power of two")
    crc32c = fields.integer("crc32c", 0, 2**32 - 1)
    wanted = -(-size // block_size)
    blocks = struct.unpack(f">{wanted}I", _packed(fields, "blocks", wanted, 4))
    if combine_blocks(blocks, block_size, size) != crc32c:
        raise fields.refuse("crc32c", "is not the combination of the blocks'")
    packed = _packed(fields, "sha256", wanted, _HASH_BYTES) if fields.has("sha256") else b""
    hashes = tuple(packed[at : at + _HASH_BYTES] for at in range(0, len(packed), _HASH_BYTES))
    return Digest(size, crc32c, block_size, blocks, hashes)


def _packed(fields: Fields, key: str, count: int, size_bytes: int) -> bytes:
    """Take the base64 of ``count`` values, one for each block."""
    text = fields.value(key)
    if not isinstance(text, str) or len(text) > MAX_BLOCKS * size_bytes * 3 // 2:
        raise fields.refuse(key, f"is not base64 of at most {MAX_BLOCKS} blocks")
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise fields.refuse(key, "is not base64") from error
    if base64.b64encode(packed).decode("ascii") != text:
        raise fields.refuse(key, "is not canonical base64")
    if len(packed) != size_bytes * count or count > MAX_BLOCKS:
        raise fields.refuse(key, f"has {len(packed)} bytes, not the {size_bytes * count} of {count} blocks")
    return packed


def _kinds(fields: Fields, key: str) -> tuple[Kind, ...]:
    found = fields.array(key, len(KINDS))
    kinds = tuple(kind for kind in KINDS if kind in found)
    if not found or len(kinds) != len(found):
        raise fields.refuse(key, f"is not a list of different kinds out of {', '.join(KINDS)}")
    return tuple(sorted(kinds, key=found.index))


# -- tombstone ----------------------------------------------------------------------------------------------


def tombstone_to_bytes(tombstone: Tombstone) -> bytes:
    """Return the one JSON form of ``tombstone``.

    Raises:
        BrokenMeta: It could not be read back.
    """
    document = {field.name: getattr(tombstone, field.name) for field in dataclasses.fields(tombstone)}
    document["kinds"] = list(tombstone.kinds)
    return _sealed(_TOMBSTONE, document, _tombstone_from_fields)


def _tombstone_from_fields(fields: Fields) -> Tombstone:
    tombstone = Tombstone(
        save_id=fields.id("save_id"),
        step=fields.integer("step", 0, names.MAX_STEP),
        kinds=_kinds(fields, "kinds"),
        reason=fields.text("reason"),
        removed_at_utc=fields.text("removed_at_utc", 64),
    )
    fields.end()
    return tombstone


# -- attempts -----------------------------------------------------------------------------------------------


def attempts_to_bytes(attempts: AttemptList) -> bytes:
    """Return the one JSON form of a list of attempts, ordered by number.

    Raises:
        BrokenMeta: It could not be read back.
    """
    ordered = sorted(attempts.attempts, key=lambda attempt: (attempt.number, attempt.id))
    document = {
        "run_id": attempts.run_id,
        "attempts": [_entry_document(attempt) for attempt in ordered],
        "requirements": [dataclasses.asdict(one) for one in sorted(attempts.requirements, key=lambda one: one.url)],
        "completed": sorted(set(attempts.completed)),
    }
    return _sealed(_ATTEMPTS, document, _attempts_from_fields, _ATTEMPTS_VERSION)


def attempts_from_bytes(data: bytes) -> AttemptList:
    """Read a list of attempts, ordered by number.

    Raises:
        BrokenMeta: It is not valid.
    """
    _, fields = _opened(data, _ATTEMPTS, newest=_ATTEMPTS_VERSION)
    return _attempts_from_fields(fields)


def _attempts_from_fields(fields: Fields) -> AttemptList:
    run_id = fields.id("run_id")
    items = fields.array("attempts", MAX_ATTEMPTS)
    mirrors = fields.array("requirements", _MAX_MIRRORS) if fields.has("requirements") else []
    completed = _texts(fields, "completed", MAX_ATTEMPTS)
    fields.end()
    requirements = [_requirement(Fields(item, f"requirements[{index}]")) for index, item in enumerate(mirrors)]
    attempts = [_entry(Fields(item, f"attempts[{index}]")) for index, item in enumerate(items)]
    if len({attempt.id for attempt in attempts}) != len(attempts):
        raise BrokenMeta("attempts names an attempt twice.")
    ordered = tuple(sorted(attempts, key=lambda attempt: (attempt.number, attempt.id)))
    if len({one.url for one in requirements}) != len(requirements):
        raise BrokenMeta("requirements names a mirror twice.")
    return AttemptList(run_id, ordered, tuple(requirements), completed)


def _requirement(fields: Fields) -> Requirement:
    requirement = Requirement(
        url=fields.text("url", _MAX_URL),
        number=fields.integer("number", 0, _MAX_NUMBER),
        is_removed=fields.boolean("is_removed"),
    )
    fields.end()
    if not requirement.url:
        raise fields.refuse("url", "is empty")
    return requirement


def _texts(fields: Fields, key: str, max_items: int) -> tuple[str, ...]:
    """Take a list of URLs or ids; it is empty if an older version wrote none."""
    values = fields.array(key, max_items) if fields.has(key) else []
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_URL or not value.isprintable():
            raise fields.refuse(key, "has an item that is not printable text")
    return tuple(values)


def _entry_document(attempt: Attempt) -> dict[str, Any]:
    return _attempt_document(attempt) | {
        "by_person": attempt.by_person,
        "root": attempt.root or None,
        "required": list(attempt.required),
    }


def _entry(fields: Fields) -> Attempt:
    """Read an attempt in a list, which has more fields than one in a meta."""
    by_person = fields.boolean("by_person", default=False)
    root = fields.text_or_none("root", 32) if fields.has("root") else None
    required = _texts(fields, "required", _MAX_MIRRORS)
    return dataclasses.replace(_attempt(fields), by_person=by_person, root=root or "", required=required)


def _attempt_document(attempt: Attempt) -> dict[str, Any]:
    parent = attempt.parent
    return {
        "id": attempt.id,
        "number": attempt.number,
        "decided": attempt.decided,
        "parent": None if parent is None else dataclasses.asdict(parent),
    }


def _attempt(fields: Fields) -> Attempt:
    parent = fields.value("parent")
    attempt = Attempt(
        id=fields.id("id"),
        number=fields.integer("number", 0, _MAX_NUMBER),
        parent=None if parent is None else _save_ref(Fields(parent, fields.name("parent"))),
        decided=fields.boolean("decided"),
    )
    fields.end()
    if attempt.parent is not None and not attempt.decided:
        raise fields.refuse("parent", "is known, but decided is false")
    return attempt


def _save_ref(fields: Fields) -> SaveRef:
    ref = SaveRef(
        attempt=fields.id("attempt"),
        number=fields.integer("number", 1, _MAX_NUMBER),
        step=fields.integer("step", 0, names.MAX_STEP),
        save_id=fields.id("save_id"),
    )
    fields.end()
    return ref


def health_to_bytes(health: AttemptHealth) -> bytes:
    """Return the one JSON form of the signs of the newest attempts.

    Raises:
        BrokenMeta: It could not be read back.
    """
    newest = list(health.signs.items())[-_HEALTH_KEPT:]
    document = {
        "run_id": health.run_id,
        "attempts": [{"id": one, "signs": sorted(signs)} for one, signs in newest],
    }
    return _sealed(_HEALTH, document, _health_from_fields)


def health_from_bytes(data: bytes) -> AttemptHealth:
    """Read the signs of attempts; those of a later version are left out.

    Raises:
        BrokenMeta: It is not valid.
    """
    return _health_from_fields(_opened(data, _HEALTH)[1])


def _health_from_fields(fields: Fields) -> AttemptHealth:
    run_id = fields.id("run_id")
    items = fields.array("attempts", _HEALTH_KEPT)
    fields.end()
    signs = {}
    for index, item in enumerate(items):
        entry = Fields(item, f"attempts[{index}]")
        said = entry.array("signs", _MAX_SIGNS)
        signs[entry.id("id")] = frozenset(sign for sign in SIGNS if sign in said)
        entry.end()
    return AttemptHealth(run_id, signs)


def _sealed(name: str, document: dict[str, Any], read: Callable[[Fields], object], version: int = VERSION) -> bytes:
    sign = signing.current().sign
    is_provable = sign is not None or "proof" in document
    if signing.current().is_signed is not None and not is_provable:
        raise NotSigned("It cannot be signed here, so it would not be believed.", hint="Set signing_key.")
    data = seal(name, document, version + _SIGNED if is_provable else version, sign)
    read(Fields(document))
    return data


def is_signed(data: bytes) -> bool:
    """Return whether a document has a signature, or the signed one that it was made from: by whom is not asked.

    Raises:
        BrokenMeta: It is no document.
    """
    if b'"signature":"' not in data and b'"proof":"' not in data:
        return False
    return not {"signature", "proof"}.isdisjoint(json_object(data))


def _opened(data: bytes, *format_names: str, newest: int = VERSION) -> tuple[str, Fields]:
    is_demanded = signing.current().is_signed is not None
    document = open_sealed(data, format_names, newest + _SIGNED, _check_signature if is_demanded else None)
    return document.pop("format"), Fields(document)


def _check_signature(document: Mapping[str, Any], content: bytes, signature: bytes | None) -> None:
    is_signed = signing.current().is_signed
    if is_signed is None or (signature is not None and is_signed(content, signature)):
        return
    if signature is None and document["format"] == _META and document.get("staged_from") and document.get("proof"):
        return  # believed for its proof: _check_proof
    by = "It is not signed" if signature is None else "It is signed, but not by a key in verify_keys"
    raise NotSigned(f"{by}.")
