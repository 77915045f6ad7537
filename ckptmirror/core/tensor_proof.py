"""Compares what is in memory after a load with what was saved, tensor by tensor, by their fingerprints.

A save lists for each rank a fingerprint of every tensor or piece that the rank held (``tensors_*.json``). After a load,
the live tensors are summed again, wherever their pieces are now.

Rules:
* A piece that lies where a saved one lay is compared with it. Only tensors that are cut in another way need the lists
  and the pieces of all ranks: the sums of the pieces of a tensor add up to its own.
* Ranks of a save may have held different values under one name (buffers). A live piece then has to be one of them.
* A tensor that has another shape or dtype now, or of which the lists do not have every piece, is not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.name_rules import ALL_NAMES, NameRules
from ckptmirror.core.regions import Region, make_up
from ckptmirror.core.sealed_json import json_object

__all__ = [
    "Compared",
    "Difference",
    "Fingerprint",
    "Summed",
    "changed",
    "compare",
    "compare_whole",
    "difference",
    "of_rank",
    "read_list",
    "total",
    "under_rules",
]

Fingerprint = tuple[int, int]
_MASK = 0xFFFFFFFF
_NO_SUMS = (-1, -1)  # of no tensor


class Summed(NamedTuple):
    """A tensor, or a piece of one, with its fingerprint.

    Attributes:
        name: Its dotted name, as ``model.layer.weight``.
        dtype: Of its values, as ``float32``.
        region: Its place in the whole tensor.
        sums: Its fingerprint.
        per_rank: Whether a list says that each rank has values of its own.
    """

    name: str
    dtype: str
    region: Region
    sums: Fingerprint
    per_rank: bool = False


class Compared(NamedTuple):
    """What came of a comparison; a name in neither is as it was saved, or was not compared.

    Attributes:
        differ: The names of tensors that are not what was saved.
        cut_otherwise: The names of those that need the lists of more ranks.
    """

    differ: tuple[str, ...]
    cut_otherwise: tuple[str, ...]


class Difference(NamedTuple):
    """How two saves differ; all are names, in order.

    Attributes:
        equal: Tensors with the same values.
        differ: Tensors of the same shape and dtype with other values.
        reshaped: Tensors whose shape or dtype differs.
        only_first: Tensors that only the first has.
        only_second: Tensors that only the second has.
        not_compared: Tensors of which a save does not list every piece, or several values.
    """

    equal: tuple[str, ...]
    differ: tuple[str, ...]
    reshaped: tuple[str, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    not_compared: tuple[str, ...]


_Pieces = dict[Region, set[Fingerprint]]
_Form = tuple[str, tuple[int, ...]]  # dtype and shape


def total(parts: Iterable[Fingerprint]) -> Fingerprint:
    """Return the fingerprint of a tensor, given those of pieces that cover it and do not overlap."""
    first = second = 0
    for one, other in parts:
        first, second = (first + one) & _MASK, (second + other) & _MASK
    return first, second


def read_list(data: bytes) -> list[Summed]:
    """Return the pieces that a ``tensors_*.json`` lists with a fingerprint; older files list none.

    Raises:
        BrokenMeta: It is not such a list.
    """
    listed = json_object(data).get("tensors")
    if not isinstance(listed, list):
        raise BrokenMeta("tensors is not a list.")
    return [_summed(entry, index) for index, entry in enumerate(listed) if "fingerprint" in _as_dict(entry, index)]


def under_rules(pieces: Iterable[Summed], rules: NameRules, *, are_saved: bool) -> list[Summed]:
    """Return the pieces that a load by these rules compares, under the model's names.

    Where a load renames or leaves out tensors, only the model and the averages are compared.

    Args:
        pieces: Saved or live ones.
        rules: Of the load.
        are_saved: Whether they are saved ones, whose names may be others than the model's.
    """
    if rules == ALL_NAMES:
        return list(pieces)
    found = []
    for piece in pieces:
        part, _, name = piece.name.partition(".")
        name = rules.renamed(name) if are_saved else name
        if part == "ema":
            found.append(piece)
        elif part == "model" and not rules.leaves(name):
            found.append(piece._replace(name=f"model.{name}"))
    return found


def of_rank(
    live: Iterable[Summed], own: Collection[Summed] | None, first: Collection[Summed], *, is_merged: bool = False
) -> tuple[list[Summed], list[list[Summed]]]:
    """Return what :func:`compare` takes, so that what a rank has of its own is compared with its own list alone.

    A value that its own list lacks then differs; without that list, nothing of it is compared.

    Args:
        live: The rank's live pieces.
        own: The list that the rank of this number wrote; None if it is not there.
        first: The list of rank 0.
        is_merged: Whether what ranks had of their own was merged, so that no list has what it is now.
    """
    if is_merged:
        of_ranks = {one.name for one in (*(own or ()), *first) if one.per_rank}
        rest = [[one for one in listed if not one.per_rank] for listed in (own or (), first)]
        return [one for one in live if one.name not in of_ranks], rest
    known = {one.name for one in own or ()}
    had_none = [one._replace(sums=_NO_SUMS) for one in first if one.per_rank and one.name not in known]
    unknown = {one.name for one in had_none} if own is None else set()
    compared = [one for one in live if one.name not in unknown]
    return compared, [list(own or ()), [one for one in first if not one.per_rank], had_none]


def compare(live: Iterable[Summed], lists: Iterable[Iterable[Summed]]) -> Compared:
    """Compare a rank's live pieces with the lists that were written by the rank of this number and by rank 0."""
    saved = _by_name(piece for one in lists for piece in one)
    differ, otherwise = [], []
    for piece in live:
        forms = saved.get(piece.name)
        if forms is None:
            otherwise.append(piece.name)
        elif (regions := forms.get((piece.dtype, piece.region.shape))) is not None:
            if piece.region not in regions:
                otherwise.append(piece.name)
            elif piece.sums not in regions[piece.region]:
                differ.append(piece.name)
    return Compared(tuple(differ), tuple(otherwise))


def compare_whole(
    live: Iterable[Iterable[Summed]], lists: Iterable[Iterable[Summed]], names: Collection[str]
) -> Compared:
    """Compare the tensors of some names, given the pieces of all ranks and the lists of all ranks of the save."""
    now = _by_name(piece for of_rank in live for piece in of_rank if piece.name in names)
    saved = _by_name(piece for one in lists for piece in one if piece.name in names)
    differ, otherwise = [], []
    for name, forms in now.items():
        for form, pieces in forms.items():
            is_equal = _equal(pieces, saved.get(name, {}).get(form))
            if is_equal is False:
                differ.append(name)
            elif is_equal is None:
                otherwise.append(name)
    return Compared(tuple(differ), tuple(otherwise))


def changed(before: Iterable[Summed], now: Iterable[Summed]) -> tuple[str, ...]:
    """Return the names of a rank's pieces that have other sums now, or are gone; not of those cut or cast otherwise."""
    current = list(now)
    sums = {(one.name, one.dtype, one.region): one.sums for one in current}
    known = {one.name for one in current}
    found = [
        one.name
        for one in before
        if one.name not in known or sums.get((one.name, one.dtype, one.region), one.sums) != one.sums
    ]
    return tuple(dict.fromkeys(found))


def difference(first: Iterable[Iterable[Summed]], second: Iterable[Iterable[Summed]]) -> Difference:
    """Compare two saves, given the lists of all ranks of each."""
    one, other = (_by_name(piece for of_rank in lists for piece in of_rank) for lists in (first, second))
    found: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    reshaped = []
    for name in sorted(one.keys() & other.keys()):
        if one[name].keys() != other[name].keys():
            reshaped.append(name)
        else:
            verdicts = {_equal(pieces, other[name][form]) for form, pieces in one[name].items()}
            found[False if False in verdicts else None if None in verdicts else True].append(name)
    return Difference(
        equal=tuple(found[True]),
        differ=tuple(found[False]),
        reshaped=tuple(reshaped),
        only_first=tuple(sorted(one.keys() - other.keys())),
        only_second=tuple(sorted(other.keys() - one.keys())),
        not_compared=tuple(found[None]),
    )


def _equal(live: _Pieces, saved: _Pieces | None) -> bool | None:
    """Whether live pieces of a tensor have the values of saved ones; None if that cannot be known."""
    if saved is None:
        return None
    if live.keys() <= saved.keys():
        return all(sums <= saved[region] for region, sums in live.items())
    if any(len(sums) > 1 for sums in saved.values()) or not make_up(saved) or not make_up(live):
        return None
    if any(len(sums) > 1 for sums in live.values()):
        return False  # ranks hold different values where the save has one
    return _total_of(live) == _total_of(saved)


def _total_of(pieces: _Pieces) -> Fingerprint:
    return total(one for sums in pieces.values() for one in sums)


def _by_name(pieces: Iterable[Summed]) -> dict[str, dict[_Form, _Pieces]]:
    found: dict[str, dict[_Form, _Pieces]] = {}
    for name, dtype, region, sums, _ in pieces:
        forms = found.setdefault(name, {})
        forms.setdefault((dtype, region.shape), {}).setdefault(region, set()).add(sums)
    return found


def _as_dict(entry: Any, index: int) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise BrokenMeta(f"tensors[{index}] is not an object.")
    return entry


def _summed(entry: Mapping[str, Any], index: int) -> Summed:
    name, dtype = entry.get("name"), entry.get("dtype")
    shape, offsets, sizes, sums = (_numbers(entry, key, index) for key in ("shape", "offsets", "sizes", "fingerprint"))
    region = Region(shape, offsets, sizes)
    if not isinstance(name, str) or not isinstance(dtype, str) or len(sums) != 2 or not region.is_inside:
        raise BrokenMeta(f"tensors[{index}] is not a piece of a tensor with its name, dtype and two sums.")
    return Summed(name, dtype, region, (sums[0], sums[1]), entry.get("per_rank") is True)


def _numbers(entry: Mapping[str, Any], key: str, index: int) -> tuple[int, ...]:
    value = entry.get(key)
    if not isinstance(value, list) or any(type(one) is not int or not 0 <= one < 1 << 63 for one in value):
        raise BrokenMeta(f"tensors[{index}].{key} is not a list of integers from 0.")
    return tuple(value)
