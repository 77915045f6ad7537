"""A mirror's saves that some nodes have uploaded and others not: which nodes they wait for, and what is there.

Rules:
* A node publishes its part last, when all its files are verified. So the part of a node says what that node saved; how
  much a node without a part has still to send, only that node knows. Of its files, those that have arrived are counted.
* An object belongs to a save if its metadata says so. Where the mirror keeps none, it goes by the name: one with the
  digits of the save id, or one without digits, if no other save can have it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ckptmirror.core import names
from ckptmirror.core.model import Meta
from ckptmirror.core.problems import PARTS_OF_SAVES, Problem

__all__ = [
    "LEFT_OFF_TEXT",
    "ROLES",
    "NodeShare",
    "PartsThere",
    "Uncommitted",
    "damaged_part_text",
    "given_up_text",
    "held_back_text",
    "is_behind_text",
    "is_held_back_text",
    "is_left_off_text",
    "is_superseded_text",
    "node_behind_text",
    "parts_there",
    "superseded_text",
    "uncommitted_save",
]

_NAMED = 8  # as many nodes are named
_HELD_BACK = "is held back"
_NO_DISK = "no disk of this job has"
LEFT_OFF_TEXT = f"{_NO_DISK} what other nodes had to send here"
"""Why a save is left off a mirror where it cannot become whole."""
_SUPERSEDED = "is superseded, and is not committed on"
ROLES = tuple(sorted(PARTS_OF_SAVES - {"part"}))
"""What the names of a save's objects begin with."""


_BEHIND = re.compile(r"node \d+ of \d+ \(from 0\) has still to upload what it saved: ")


def node_behind_text(part: str, place: str) -> str:
    """Say that a part is not there yet, given its name."""
    return f"{_behind(part)}{part} is not on {place} yet."


def damaged_part_text(part: str, place: str) -> str:
    """Say that a part cannot be read, given its name: its node says what to delete, and sends it again."""
    return f"{_behind(part)}{part} on {place} is damaged, and `ckptmirror drain` on that node says what to do."


def _behind(part: str) -> str:
    parsed = names.parse_name(part)
    assert parsed is not None
    return f"node {parsed.part - 1} of {parsed.parts} (from 0) has still to upload what it saved: "


def is_behind_text(reason: str | None) -> bool:
    """Whether such a part alone is waited for, by the reason that the table has, or that rotation gives."""
    return reason is not None and _BEHIND.search(reason) is not None


def held_back_text(step: int, url: str, attempt: str, way: str) -> str:
    """Say that a save waits for one of a newer attempt, which did not continue from it, and how a person decides."""
    return (
        f"Step {step} is held back until {url} has a save of {attempt}, of which this disk has a save or a part, too: "
        f"it did not continue from step {step}. The next start decides between them. If what that attempt saved is "
        f"lost, continue from step {step} {way}."
    )


def is_held_back_text(reason: str | None) -> bool:
    """Whether a save waits for that alone."""
    return reason is not None and _HELD_BACK in reason


def given_up_text(step: int) -> str:
    """Say that a save is waited for on no mirror any more, since the run went on without it."""
    return f"step {step} is abandoned: {_NO_DISK} the rest, and the run went on without it"


def is_left_off_text(reason: str) -> bool:
    """Whether a save is not waited for on a mirror, or on any, until a job has the disks of all nodes of it."""
    return _NO_DISK in reason


def superseded_text(step: int, url: str, why: str) -> str:
    """Say that a save is not committed on a mirror, since the run went on without it."""
    return f"Step {step} {_SUPERSEDED} {url}: {why}."


def is_superseded_text(reason: str) -> bool:
    """Whether a save is not committed for that reason alone: nothing is to be mended."""
    return _SUPERSEDED in reason


@dataclass(frozen=True, slots=True)
class PartsThere:
    """The parts of one save that a mirror lists.

    Attributes:
        digits: The first eight of the save id.
        nodes: How many nodes saved it.
        names: The names of the parts by node, from 0.
    """

    step: int
    digits: str
    nodes: int
    names: Mapping[int, str]

    def absent(self, most: int) -> list[int]:
        """Return the nodes whose part is not there, at most so many: a name may claim any number of nodes."""
        return list(islice((node for node in range(self.nodes) if node not in self.names), most))

    @property
    def problem(self) -> Problem:
        """What is wrong, for a listing."""
        there = f"{self.nodes} nodes saved it, and it waits for {self.awaited}"
        all_there = "`ckptmirror drain` on any of them that still has it does it, or says why not"
        sends = (
            "`ckptmirror drain` there finishes it, or says why not, if that node still has its part; or "
            "`ckptmirror push` there if it does not use this mirror"
        )
        drains = sends if self.absent(1) else all_there
        return Problem(f"{there}: {drains}", self.step)

    @property
    def awaited(self) -> str:
        """The nodes that it waits for, in words."""
        if len(self.names) == self.nodes:
            return "the last of them to commit"
        first = self.absent(_NAMED + 1)
        more = ", ..." if len(first) > _NAMED else ""
        return f"node{'s' if len(first) > 1 else ''} {', '.join(map(str, first[:_NAMED]))}{more}"


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What a node saved, by its part on the mirror.

    Attributes:
        missing_files: How many of its files are not there, or not with their size.
        missing_bytes: Their bytes.
    """

    node: int
    files: int
    size_bytes: int
    missing_files: int = 0
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Uncommitted:
    """A save that waits for nodes.

    Attributes:
        save_id: 32 hex digits; the first eight of them if no part was read.
        shares: What nodes saved, for each part that was read.
        other_files: How many files of it are there that no part names which was read.
        other_bytes: Their bytes.
    """

    parts: PartsThere
    save_id: str
    shares: tuple[NodeShare, ...] = ()
    other_files: int = 0
    other_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """How much of it is there."""
        return sum(share.size_bytes - share.missing_bytes for share in self.shares) + self.other_bytes


def parts_there(listed: Iterable[str], known: Iterable[str]) -> list[PartsThere]:
    """Return the saves of which a mirror has parts and no meta, by step.

    Args:
        listed: All names on the mirror.
        known: The ids of the saves that a meta or a tombstone there names.
    """
    digits = {save_id[:8] for save_id in known}
    found: dict[tuple[int, str, int], dict[int, str]] = {}
    for name in listed:
        parsed = names.parse_name(name)
        if parsed is not None and parsed.role == "part" and parsed.step is not None and parsed.tag not in digits:
            found.setdefault((parsed.step, parsed.tag, parsed.parts), {})[parsed.part - 1] = name
    return [PartsThere(step, tag, of, dict(sorted(there.items()))) for (step, tag, of), there in sorted(found.items())]


def uncommitted_save(
    there: PartsThere,
    parts: Sequence[Meta],
    listed: Mapping[str, tuple[int, str]],
    claimed: Collection[str],
    *,
    is_alone: bool,
) -> Uncommitted:
    """Say what of a save is on a mirror.

    Args:
        there: Which parts are there.
        parts: Those that were read.
        listed: Size and owner (a save id; "" if the mirror keeps none) of the objects there, by name.
        claimed: The names of objects that metas of other saves name.
        is_alone: Whether this is the only save of its step that waits for nodes.
    """
    sizes = {name: size_bytes for name, (size_bytes, _) in listed.items()}
    shares = []
    named: set[str] = set()
    for part in sorted(parts, key=lambda part: part.node):
        missing = [a for a in part.artifacts if sizes.get(a.object_name) != a.digest.size_bytes]
        missing_bytes = sum(artifact.digest.size_bytes for artifact in missing)
        shares.append(NodeShare(part.node, len(part.artifacts), part.size_bytes, len(missing), missing_bytes))
        named |= {artifact.object_name for artifact in part.artifacts}
    save_id = parts[0].save_id if parts else there.digits
    others = [
        size_bytes
        for name, (size_bytes, owner) in listed.items()
        if name not in named and name not in claimed and _is_of(there, name, owner, is_alone=is_alone)
    ]
    return Uncommitted(there, save_id, tuple(shares), len(others), sum(others))


def _is_of(there: PartsThere, name: str, owner: str, *, is_alone: bool) -> bool:
    parsed = names.parse_name(name.partition("/")[0])
    if parsed is None or parsed.role not in ROLES or parsed.step != there.step:
        return False
    if owner:
        return owner[:8] == there.digits
    return parsed.tag == there.digits or (is_alone and not parsed.tag)
