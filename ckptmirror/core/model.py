"""What a save is: the values that every layer passes around.

Rules:
* Values only: frozen, compared by content, no I/O, no clock.
* Only ``codec.py`` converts them to JSON bytes and back.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

__all__ = [
    "ALL_NODES",
    "KINDS",
    "MAX_BLOCKS",
    "MIN_BLOCK_SIZE_BYTES",
    "SAVED_KINDS",
    "SIGNS",
    "Artifact",
    "Attempt",
    "AttemptHealth",
    "AttemptList",
    "Digest",
    "Kind",
    "Meta",
    "SaveRef",
    "Sign",
    "Tombstone",
    "new_id",
]

Kind = Literal["dcp", "model", "emergency"]
KINDS: tuple[Kind, ...] = ("dcp", "model", "emergency")
SAVED_KINDS: tuple[Kind, ...] = ("dcp", "model")
Sign = Literal["reported", "diverged", "ended", "saved"]
SIGNS: tuple[Sign, ...] = ("reported", "diverged", "ended", "saved")

ALL_NODES = -1  # the ``node`` of a meta merged from the parts of several nodes
MIN_BLOCK_SIZE_BYTES = 4 * 1024 * 1024
MAX_BLOCKS = 4096


def new_id() -> str:
    """Return 32 random hex digits: the form of a run id, an attempt id and a save id."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Digest:
    """Size and checksums of one file.

    Attributes:
        size_bytes: Length of the file.
        crc32c: CRC-32C (Castagnoli) of the whole file, an unsigned 32-bit integer.
        block_size_bytes: A power of two, at least ``MIN_BLOCK_SIZE_BYTES``.
        blocks: CRC-32C of each block in order, at most ``MAX_BLOCKS``; the last block may be short. Empty for an empty
            file, whose crc32c is 0.
        hashes: If the save is signed, the SHA-256 tree hash of each block (RFC 6962, section 2.1, over pieces of
            ``MIN_BLOCK_SIZE_BYTES``), in order; else empty. A crc32c finds damage, but not intent.
    """

    size_bytes: int
    crc32c: int
    block_size_bytes: int
    blocks: tuple[int, ...]
    hashes: tuple[bytes, ...] = ()

    def agrees_with(self, other: Digest) -> bool:
        """Whether both may be of the same bytes: what one does not have, because it was not signed, is not compared."""
        if not (self.hashes and other.hashes):
            return replace(self, hashes=()) == replace(other, hashes=())
        return self == other


@dataclass(frozen=True, slots=True)
class SaveRef:
    """Names one save: the parent of an attempt."""

    attempt: str
    number: int
    step: int
    save_id: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call of ``resume`` that loaded or started.

    Attributes:
        id: 32 hex digits.
        number: One higher than any attempt that this one saw when it claimed the run.
        parent: The save it resumed from; None for a start from scratch (or while undecided).
        decided: False only in lists of ckptmirror 0.1.0, from the claim until the parent was known. An undecided
            attempt never counts in the lineage.
        by_person: Whether a person decided where it starts: a rewind, a named step, a forced start from scratch. Lists
            record this, metas do not.
        root: The identity of the root that claimed it (32 hex digits); "" if it comes from a meta or an older list.
        required: For a person's attempt, the mirrors that had to list it: the run's required mirrors at that time.
    """

    id: str
    number: int
    parent: SaveRef | None
    decided: bool = True
    by_person: bool = False
    root: str = ""
    required: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a list says of one mirror: a start requires it, or a person removed it later (``ckptmirror forget-mirror``).

    Attributes:
        url: The mirror's URL.
        number: Of the newest attempt that began with it as required; of a removal, of the newest attempt known then.
        is_removed: Whether a person removed it.
    """

    url: str
    number: int
    is_removed: bool = False


@dataclass(frozen=True, slots=True)
class AttemptList:
    """Content of ``.ckptmirror/attempts.json`` and of ``writer.json`` on a mirror. It only grows.

    Attributes:
        requirements: The newest word on each mirror that is required, or was until a person removed it.
        completed: In a root's own list: ids of its attempts whose claim every required mirror recorded. Empty on a
            mirror.
    """

    run_id: str
    attempts: tuple[Attempt, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    completed: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        """URLs of the run's required mirrors."""
        return tuple(one.url for one in self.requirements if not one.is_removed)


@dataclass(frozen=True, slots=True)
class AttemptHealth:
    """Content of ``.ckptmirror/health.json``: how far attempts of this root got. Only the newest are kept.

    Attributes:
        signs: For each attempt, by id, oldest first: whether it ``reported`` a step of training; whether it
            ``diverged``, that is, reported a loss that is not finite; whether it ``ended`` in order, or ``saved``. The
            last two are recorded only of one that reported.
    """

    run_id: str
    signs: Mapping[str, frozenset[Sign]] = field(default_factory=dict)

    def with_sign(self, attempt: str, sign: Sign) -> AttemptHealth:
        """Return this with one sign more."""
        return replace(self, signs={**self.signs, attempt: self.signs.get(attempt, frozenset()) | {sign}})


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file of a save.

    Attributes:
        path: Relative to the root, with ``/`` (``dcp_000200/__0_0.distcp``).
        kinds: The kinds that need this file.
        rank: The global rank that wrote it, None if it belongs to no single rank.
        digest: Size and checksums, taken while the bytes were written.
        object: The name on the mirror if it differs from ``path``; always None in a local meta.
    """

    path: str
    kinds: tuple[Kind, ...]
    rank: int | None
    digest: Digest
    object: str | None = None

    @property
    def object_name(self) -> str:
        """Name of the object that holds this artifact on the mirror, below the mirror's prefix."""
        return self.object if self.object is not None else self.path


@dataclass(frozen=True, slots=True)
class Meta:
    """The JSON that names every artifact of one save (or of one node's part of it).

    Attributes:
        save_id: 32 hex digits.
        save_number: The save's number within its attempt, from 1.
        tag: "" or the 8 hex digits of the save id that follow the step in this save's names.
        world_size: Number of ranks that wrote the save.
        nodes: Number of nodes; ``node`` is this one, from 0, or ``ALL_NODES`` in a meta merged from all nodes' parts.
        training_config: The user's plain values.
        architecture_hash: Hash of the model's names, shapes and dtypes; after a point, a mark of the attempt's
            ``rename`` (:func:`~ckptmirror.core.name_rules.marked`). None if neither is known.
        metrics: User metrics; NaN and infinities are not allowed.
        fields: User fields, plain JSON (a tracker's run id, ...).
        created_at_utc: ISO 8601 text, for people only; nothing is ordered by it.
        staged_from: The mirror URL, if this meta was written by ``stage``.
        partial: Whether files of the save are missing here. Only a staged copy may lack files, and a save that was
            narrowed to what can be loaded (:meth:`narrowed`).
        proof: In a process that demands signatures: the signed document that this meta was read from, so that a staged
            copy can carry it. "" otherwise.
    """

    run_id: str
    attempt: Attempt
    step: int
    save_id: str
    save_number: int
    kinds: tuple[Kind, ...]
    world_size: int
    nodes: int
    node: int
    artifacts: tuple[Artifact, ...]
    tag: str = ""
    training_config: Mapping[str, Any] = field(default_factory=dict)
    architecture_hash: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    created_at_utc: str = ""
    staged_from: str | None = None
    partial: bool = False
    proof: str = field(default="", compare=False, repr=False)

    @property
    def is_whole(self) -> bool:
        """Whether this meta describes the whole save, not one node's part of it: of a snapshot, all ranks' files."""
        if self.kinds == ("emergency",):
            return len({one.rank for one in self.artifacts} - {None}) == self.world_size
        return self.nodes == 1 or self.node == ALL_NODES

    @property
    def ref(self) -> SaveRef:
        """The reference that a later attempt uses to name this save as its parent."""
        return SaveRef(self.attempt.id, self.save_number, self.step, self.save_id)

    @property
    def size_bytes(self) -> int:
        """Sum of the artifacts' sizes."""
        return sum(artifact.digest.size_bytes for artifact in self.artifacts)

    def artifacts_of(self, *kinds: Kind) -> tuple[Artifact, ...]:
        """Return the artifacts that any of ``kinds`` needs, in the meta's order."""
        return tuple(a for a in self.artifacts if set(a.kinds) & set(kinds))

    @property
    def paths(self) -> frozenset[str]:
        """The paths of all artifacts."""
        return frozenset(artifact.path for artifact in self.artifacts)

    def kinds_without(self, artifacts: Iterable[Artifact]) -> tuple[Kind, ...]:
        """Return the kinds that need none of ``artifacts``, in the meta's order."""
        needed = {kind for artifact in artifacts for kind in artifact.kinds}
        return tuple(kind for kind in self.kinds if kind not in needed)

    def narrowed(self, kinds: Collection[Kind], without: Collection[str] = ()) -> Meta:
        """Return a meta with only these kinds and their artifacts, marked partial; itself if it has no others.

        Args:
            kinds: The kinds to keep.
            without: The paths of artifacts to leave out.
        """
        if set(self.kinds) <= set(kinds) and not without:
            return self
        kept = (artifact for artifact in self.artifacts_of(*kinds) if artifact.path not in without)
        named = tuple(replace(a, kinds=tuple(k for k in a.kinds if k in kinds)) for a in kept)
        return replace(self, kinds=tuple(k for k in self.kinds if k in kinds), artifacts=named, partial=True)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What replaces a mirror's meta after retention removed the save."""

    save_id: str
    step: int
    kinds: tuple[Kind, ...]
    reason: str
    removed_at_utc: str


def top_names(artifacts: Sequence[Artifact]) -> list[str]:
    """Return the names directly below the root that a save's artifacts occupy, each once."""
    return list(dict.fromkeys(artifact.path.partition("/")[0] for artifact in artifacts))
