"""Checks, before each save is committed, that ranks which hold a tensor of one name hold the same value.

A save keeps one value per name. Kind ``dcp`` takes a replicated tensor from any rank that holds it, kind ``model`` from
rank 0. If the ranks' values differ, a checkpoint would mix ranks, or lose what the other ranks hold.

Rules:
* Two ranks are compared in the pieces that both hold: same name, same piece of the whole tensor. Different shards are
  different pieces.
* First each rank sends a few digests. Only if those differ, one rank of each side sends its full list.
* Of a model in stages, the ranks of one stage are compared.
* :data:`BUFFERS`, :data:`PLAIN` and :data:`AVERAGES` may differ: each replica of a data-parallel model has its own
  running averages, but continues from those of rank 0, the only ones that are saved. A difference is told once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "AVERAGES",
    "BUFFERS",
    "PLAIN",
    "WHOLE",
    "Digests",
    "Held",
    "differing",
    "digests_of",
    "may_differ",
    "of_stage",
    "ranks_text",
    "representatives",
    "sides",
]

WHOLE = ""
"""The group of the tensors that every rank holds whole; shards are grouped by how they are sharded."""
BUFFERS = "buffers"
"""The group of what a model holds beside its parameters, which rank 0 alone saves."""
PLAIN = "plain values"
"""The group of what ``get_extra_state()`` returns beside tensors, which rank 0 alone saves."""
AVERAGES = "averages"
"""The group of the averages of the weights, where rank 0 alone saves them."""
_OF_STAGE = " of stage "

Digests = Mapping[str, tuple[str, str]]
"""By group: a digest of which pieces a rank holds, and one of their values."""

_ALIKE = 8  # lists per side at most: enough to name what differs, while a thousand lists would be large


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor, or a piece of one, that a rank holds.

    Attributes:
        group: One of the groups above if every rank holds all of it; else how it is sharded.
        name: Its dotted name.
        piece: Which piece of the whole it is, "" for all of it.
        value: Shape, dtype and sums of the bytes.
    """

    group: str
    name: str
    piece: str
    value: str


def of_stage(group: str, stage: int | None) -> str:
    """Return the group for the tensors of a stage; unchanged if there are no stages."""
    return group if stage is None else f"{group}{_OF_STAGE}{stage}"


def may_differ(group: str) -> bool:
    """Whether the tensors of a group may differ between ranks, because rank 0's are saved for all."""
    return group.partition(_OF_STAGE)[0] in (BUFFERS, PLAIN, AVERAGES)


def digests_of(held: Iterable[Held]) -> Digests:
    """Return a rank's digests of everything that it holds."""
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
    """Sort the ranks of ``group`` by what they hold: one list for each value, of ranks that hold the same pieces.

    Args:
        digests: Every rank's digests, by rank.
        group: The group to compare.

    Returns:
        Empty if no two ranks differ.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, own in enumerate(digests):
        if group in own:
            ranks.setdefault(own[group], []).append(rank)
    if may_differ(group) or group.partition(_OF_STAGE)[0] == WHOLE:
        found = list(ranks.values())
    else:
        alike = Counter(pieces for pieces, _ in ranks)
        found = [members for (pieces, _), members in ranks.items() if alike[pieces] > 1]
    return found if len(found) > 1 else []


def representatives(digests: Sequence[Digests], told: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return, by group, the ranks whose lists show what differs; empty if nothing does.

    Args:
        digests: Every rank's digests, by rank.
        told: Groups that are not compared.
    """
    found: dict[str, tuple[int, ...]] = {}
    for group in sorted({group for own in digests for group in own} - set(told)):
        asked: dict[str, list[int]] = {}
        for first, *_ in sides(digests, group):
            asked.setdefault(digests[first][group][0], []).append(first)
        if asked:
            found[group] = tuple(rank for alike in asked.values() for rank in alike[:_ALIKE])
    return found


def differing(lists: Iterable[Iterable[Held]]) -> dict[str, list[str]]:
    """Return, by group, the names of tensors whose values differ between the ranks' lists, each once, in order."""
    values: dict[tuple[str, str, str], str] = {}
    found: dict[str, dict[str, None]] = {}
    for one in (one for held in lists for one in held):
        if values.setdefault((one.group, one.name, one.piece), one.value) != one.value:
            found.setdefault(one.group, {})[one.name] = None
    return {group: list(names) for group, names in found.items()}


def ranks_text(found: Sequence[Sequence[int]]) -> str:
    """Return a text that names the sides: ``ranks 0-3 and rank 4``."""
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
