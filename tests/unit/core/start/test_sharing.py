"""Who sends which file to whom: each that lacks one gets it once, from one that has it, and all agree on the plan."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core.start.sharing import Holding, fetched_by, transfers

PATHS = st.sets(st.sampled_from("abcdef"))


NODES = st.dictionaries(st.integers(0, 5), st.tuples(PATHS, PATHS), min_size=1)


def reported(nodes: dict[int, tuple[set[str], set[str]]]) -> dict[int, Holding]:
    """What nodes say that have and need these files."""
    return {rank: Holding(frozenset(has), tuple(sorted(needs - has))) for rank, (has, needs) in nodes.items()}


@given(NODES)
def test_every_node_gets_what_it_lacks_from_one_that_has_it(nodes: dict[int, tuple[set[str], set[str]]]) -> None:
    holdings = reported(nodes)
    sizes = dict.fromkeys("abcdef", 10)
    plan, absent = transfers(holdings, sizes)
    assert transfers(dict(reversed(holdings.items())), sizes) == (plan, absent)
    arrives = Counter((transfer.path, rank) for transfer in plan for rank in transfer.to)
    assert set(arrives.values()) <= {1}
    lacked = {(path, rank) for rank, holding in holdings.items() for path in holding.lacks}
    held = {path for holding in holdings.values() for path in holding.has}
    assert set(arrives) == {one for one in lacked if one[0] in held}
    assert set(absent) == {path for path, _ in lacked} - held
    assert all(transfer.path in holdings[transfer.source].has for transfer in plan)


def test_the_load_is_spread_over_those_that_have_a_file() -> None:
    has = frozenset("abcd")
    plan, _ = transfers({0: Holding(has), 1: Holding(has), 2: Holding(lacks=tuple("abcd"))}, dict.fromkeys("abcd", 10))
    assert Counter(transfer.source for transfer in plan) == {0: 2, 1: 2}


class Path(str):
    """A path that counts how often it is compared."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Path.compared += 1
        return str.__eq__(self, other)


def test_a_plan_for_many_files_takes_no_more_than_so_many_comparisons_for_each() -> None:
    """A hundred thousand empty files in the directory of a save took half an hour on every rank."""
    paths = [Path(f"dcp_000100/{number}") for number in range(2000)]
    holdings = {0: Holding(frozenset(map(str, paths))), 1: Holding(lacks=tuple(paths)), 2: Holding(lacks=tuple(paths))}
    plan, absent = transfers(holdings, dict.fromkeys(map(str, paths), 0))
    assert (len(plan), absent) == (len(paths), [])
    assert Path.compared < 20 * len(paths)


@given(NODES)
def test_downloads_that_are_shared_leave_the_mirror_once_and_reach_every_node(
    nodes: dict[int, tuple[set[str], set[str]]],
) -> None:
    holdings, sizes = reported(nodes), dict.fromkeys("abcdef", 10)
    fetched = fetched_by(holdings, "abcdef", sizes, shared=True)
    assert fetched_by(dict(reversed(holdings.items())), "abcdef", sizes, shared=True) == fetched
    lacked = {path for holding in holdings.values() for path in holding.lacks}
    held = {path for holding in holdings.values() for path in holding.has}
    assert Counter(path for paths in fetched.values() for path in paths) == dict.fromkeys(lacked - held, 1)
    assert all(set(paths) <= set(holdings[rank].lacks) for rank, paths in fetched.items())
    after = {rank: holding.with_files(fetched.get(rank, ())) for rank, holding in holdings.items()}
    plan, absent = transfers(after, sizes)
    arrived = Counter((transfer.path, rank) for transfer in plan for rank in transfer.to)
    assert arrived == {(path, rank): 1 for rank, holding in after.items() for path in holding.lacks}
    assert absent == []


@given(NODES)
def test_downloads_that_are_not_shared_are_what_each_node_lacks(nodes: dict[int, tuple[set[str], set[str]]]) -> None:
    fetched = fetched_by(reported(nodes), "abcdef", {}, shared=False)
    assert fetched == {rank: tuple(sorted(needs - has)) for rank, (has, needs) in nodes.items() if needs - has}


def test_shared_downloads_are_spread_by_size_over_the_nodes_that_lack_them() -> None:
    lacks = Holding(lacks=tuple("abcd"))
    assert fetched_by({0: lacks, 1: lacks}, "abcd", {"a": 30, "b": 10, "c": 10, "d": 10}, shared=True) == {
        0: ("a",),
        1: ("b", "c", "d"),
    }
