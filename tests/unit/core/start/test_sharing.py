"""Who sends which file to whom: each that lacks one gets it once, from one that has it, and all agree on the plan."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core.start.sharing import Holding, transfers

PATHS = st.sets(st.sampled_from("abcdef"))


@given(st.dictionaries(st.integers(0, 5), st.tuples(PATHS, PATHS), min_size=1))
def test_every_node_gets_what_it_lacks_from_one_that_has_it(nodes: dict[int, tuple[set[str], set[str]]]) -> None:
    holdings = {rank: Holding(frozenset(has), tuple(sorted(needs - has))) for rank, (has, needs) in nodes.items()}
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
