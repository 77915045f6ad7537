"""Whether ranks that hold a tensor under one name hold one value: compared at every save, before it is committed.

A save keeps one value under one name. Kind ``dcp`` takes what several ranks hold alike from any of them, kind ``model``
from rank 0: where they differ, a checkpoint would mix ranks, or lose what the others have.

Rules:
* Compared is what has the same name, and is the same piece of the whole, on several ranks. Other shards are other
  pieces.
* First each rank gives a few digests; only where those differ, one rank of each kind gives its list.
* :data:`BUFFERS` may differ: each replica of a data-parallel model has running averages of its own, and goes on from
  rank 0's. They are saved from rank 0 alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["BUFFERS", "WHOLE", "Digests", "Held", "differing", "digests_of", "ranks_text", "representatives", "sides"]

WHOLE = ""
"""The group of the tensors that every rank holds whole; shards are grouped by how they are sharded."""
BUFFERS = "buffers"
"""The group of what a model holds beside its parameters, which rank 0 alone saves."""

Digests = Mapping[str, tuple[str, str]]
"""By group: a digest of which pieces a rank holds, and one of their values."""

_ALIKE = 8  # that hold the same pieces: they suffice to name what differs, and a thousand lists are not small


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor, or a piece of one, that a rank holds.

    Attributes:
        group: Where every rank holds it alike, :data:`WHOLE` or :data:`BUFFERS`; else how it is sharded.
        name: Its dotted name.
        piece: Which piece of the whole it is, "" for all of it.
        value: Shape, dtype and sums of the bytes.
    """

    group: str
    name: str
    piece: str
    value: str


def digests_of(held: Iterable[Held]) -> Digests:
    """Return what a rank says of all that it holds."""
    groups: dict[str, list[Held]] = {}
    for one in held:
        groups.setdefault(one.group, []).append(one)
    return {
        group: (
            _digest(f"{one.name}\0{one.piece}" for one in members),
            _digest(f"{one.name}\0{one.piece}\0{one.value}" for one in members),
        )
        for group, members in groups.items()
    }


def sides(digests: Sequence[Digests], group: str) -> list[list[int]]:
    """Return the ranks of ``group`` by what they hold: one list for each value, of ranks that hold the same pieces.

    Args:
        digests: Every rank's digests, by rank.
        group: Which group to look at.

    Returns:
        Empty where no two ranks can differ.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, own in enumerate(digests):
        if group in own:
            ranks.setdefault(own[group], []).append(rank)
    if group in (WHOLE, BUFFERS):
        found = list(ranks.values())
    else:
        alike = Counter(pieces for pieces, _ in ranks)
        found = [members for (pieces, _), members in ranks.items() if alike[pieces] > 1]
    return found if len(found) > 1 else []


def representatives(digests: Sequence[Digests], *, skip: str | None = None) -> dict[str, tuple[int, ...]]:
    """Return the ranks whose lists tell what differs, by group; empty where nothing does. ``skip`` is not looked at."""
    found: dict[str, tuple[int, ...]] = {}
    for group in sorted({group for own in digests for group in own if group != skip}):
        asked: dict[str, list[int]] = {}
        for first, *_ in sides(digests, group):
            asked.setdefault(digests[first][group][0], []).append(first)
        if asked:
            found[group] = tuple(rank for alike in asked.values() for rank in alike[:_ALIKE])
    return found


def differing(lists: Iterable[Iterable[Held]]) -> dict[str, list[str]]:
    """Return the names of what has different values in the ranks' lists, by group, each once and in their order."""
    values: dict[tuple[str, str, str], str] = {}
    found: dict[str, dict[str, None]] = {}
    for one in (one for held in lists for one in held):
        if values.setdefault((one.group, one.name, one.piece), one.value) != one.value:
            found.setdefault(one.group, {})[one.name] = None
    return {group: list(names) for group, names in found.items()}


def ranks_text(found: Sequence[Sequence[int]]) -> str:
    """Say which ranks differ from which: ``ranks 0-3 and rank 4``."""
    named = [_ranks(side) for side in found[:3]]
    if len(found) > 3:
        named.append(f"{sum(map(len, found[3:]))} more")
    return f"{', '.join(named[:-1])} and {named[-1]}"


def _ranks(side: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in side:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:4])
    return f"rank{'s' if len(side) > 1 else ''} {text}{', ...' if len(runs) > 4 else ''}"


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for line in sorted(lines):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()
