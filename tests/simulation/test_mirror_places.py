"""Which place a mirror is that nobody remembers: every short history of what 2 and 3 nodes see under its URL.

Between the look at a start and the first use a mount may go or come. What one node sees wrongly, and each change to
another wrong thing, is a fault; that the right place is there again is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from ckptmirror.core.start import mirror_places
from ckptmirror.core.start.mirror_places import UNKNOWN, Expected

URL = "file:///nfs/run"
RIGHT, LEFT, DARK = "right", "left", "dark"
"""The file system that should be mounted; a mirror that somebody left on a disk; what cannot be read now.

``own-N`` is the empty directory on node N where nothing is mounted.
"""

Places = dict[str, Expected]
Sights = tuple[tuple[str, ...], ...]
"""What each node sees: when all look, when the first node asks, and when all use it."""


@dataclass(frozen=True)
class World:
    """The places that are mirrors, and which one each node remembers."""

    made: frozenset[str]
    remembered: tuple[str | None, ...]
    faults: int = 0

    def sees(self, place: str) -> str | None:
        return UNKNOWN if place == DARK else place if place in self.made else None


@dataclass
class Start:
    """A start of all nodes, by the rules of ``core.start.mirror_places`` and ``stores.same_place``."""

    world: World
    sights: Sights
    used: dict[int, str]
    makers: list[int]
    expected: str | None = None

    @classmethod
    def of(cls, world: World, sights: Sights) -> Start:
        start = cls(world, sights, {}, [])
        known = next((place for place in world.remembered if place), None)
        looks = [{} if known else {URL: world.sees(place)} for place in sights[0]]
        expected = mirror_places.expected_places(looks[0], looks[1:])
        start._remember(0, known)
        start._use(0, sights[1][0], expected)
        told = start.world.remembered[0]
        others = mirror_places.expected_by_others([URL], expected)
        for node in range(1, len(sights[2])):
            start._remember(node, told)
            start._use(node, sights[2][node], others)
        start._use(0, sights[2][0], expected)
        start.expected = expected[URL][0] if URL in expected else None
        for node in range(len(sights[2])):
            start._remember(node, start.expected)
        return start

    def _remember(self, node: int, place: str | None) -> None:
        remembered = list(self.world.remembered)
        remembered[node] = remembered[node] or place or None
        self.world = replace(self.world, remembered=tuple(remembered))

    def _use(self, node: int, place: str, expected: Places) -> None:
        there, known = self.world.sees(place), self.world.remembered[node]
        if there == UNKNOWN or known not in (None, there):
            return
        if known is None and URL in expected and not mirror_places.is_expected(there, expected[URL][0]):
            return
        if there is None:
            self.makers.append(node)
            self.world = replace(self.world, made=self.world.made | {place})
        self._remember(node, place)
        self.used.setdefault(node, place)

    def wrong(self, before: World, faults: int) -> str | None:
        """Return what must not be after so many faults."""
        used, remembered = set(self.used.values()), set(self.world.remembered) - {None}
        if any(self.makers):
            return "a node that is not the first makes a mirror"
        if len(self.makers) > 1 and RIGHT in self.makers:
            return "two mirrors are made"
        look = self.sights[0]
        if self.expected and remembered != {self.expected}:
            return "a verb may take another place than the one that a node saw"
        if self.first_changes():
            return None  # it decides by itself, from its look to its first use
        if RIGHT in before.made and self.makers and (RIGHT in look or (look[0] != DARK and DARK in look)):
            return "one is made beside a mirror that a node saw, or could not tell"
        if faults > 1:
            return None
        if len(used) > 1 or len(remembered) > 1:
            return "two places are used"
        if RIGHT not in before.made and (LEFT in look or self.used.get(0, RIGHT) != RIGHT):
            return None  # nothing tells which is right: what is there, or what the first node has
        if used - {RIGHT} and not remembered_wrongly(before):
            return "another place is used"
        if LEFT in look or (RIGHT not in before.made and DARK in look) or remembered_wrongly(before):
            return None  # nobody can tell
        is_there = RIGHT in before.made or self.sights[1][0] == RIGHT
        has_it = {node for node, seen in enumerate(self.sights[2]) if seen == RIGHT and (is_there or node == 0)}
        return "a node that has it mounted does not use it" if has_it - self.used.keys() else None

    def first_changes(self) -> bool:
        """Whether the first node sees a mirror when all look, and something else that it can read before it is met."""
        seen = [sight[0] for sight in self.sights]
        return seen[0] in (RIGHT, LEFT) and any(later not in (seen[0], DARK) for later in seen[1:])


def remembered_wrongly(world: World) -> bool:
    return any(place not in (None, RIGHT) for place in world.remembered)


def all_sights(nodes: int, faults: int) -> Iterator[tuple[Sights, int]]:
    """Yield all that the nodes may see at one start with so many faults at most, and with how many."""
    kinds = [(RIGHT, LEFT, f"own-{node}", DARK) for node in range(nodes)]
    for look, use in itertools.product(itertools.product(*kinds), repeat=2):
        for asks in kinds[0]:
            sights = look, (asks, *use[1:]), use
            count = sum(
                now not in (RIGHT, before)
                for seen in zip(*sights, strict=True)
                for before, now in itertools.pairwise((RIGHT, *seen))
            )
            if count <= faults:
                yield sights, count


def first_wrong(nodes: int, faults: int, starts: int = 2) -> str | None:
    """Return what is wrong in the shortest history in which something is."""
    nobody = (None,) * nodes
    worlds = {World(frozenset(made), nobody) for made in ({LEFT}, {LEFT, RIGHT})}
    seen = set(worlds)
    for _ in range(starts):
        after: set[World] = set()
        for world in worlds:
            for sights, more in all_sights(nodes, faults - world.faults):
                start = Start.of(world, sights)
                if wrong := start.wrong(world, world.faults + more):
                    return wrong
                after.add(replace(start.world, faults=world.faults + more))
        worlds, seen = after - seen, seen | after
    return None


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (None, None, "anything"),
        (None, "a", ("a", "node 1")),
        (None, UNKNOWN, (None, "node 1")),
        ("a", None, "anything"),
        ("a", "a", "anything"),
        ("a", "b", ("", "another node")),
        ("a", UNKNOWN, "anything"),
        (UNKNOWN, None, "anything"),
        (UNKNOWN, "a", ("a", "node 1")),
        (UNKNOWN, UNKNOWN, "anything"),
    ],
)
def test_what_nodes_expect_by_what_they_see(
    first: str | None, second: str | None, expected: Expected | Literal["anything"]
) -> None:
    found = mirror_places.expected_places({URL: first}, [{URL: second}])
    assert found.get(URL, "anything") == expected
    others = mirror_places.expected_by_others([URL], found)
    assert others[URL] == ((None, "node 0") if expected == "anything" else expected)
    for third in (second, None):
        assert mirror_places.expected_places({URL: first}, [{URL: second}, {URL: third}]) == found


@pytest.mark.parametrize(("identity", "there"), [(None, ["a", "b"]), ("a", ["a"]), (UNKNOWN, [])])
def test_which_places_are_expected(identity: str | None, there: list[str]) -> None:
    assert [one for one in (None, "a", "b") if mirror_places.is_expected(one, identity)] == there


@pytest.mark.parametrize(("nodes", "faults"), [(2, 0), (2, 1), (2, 3), (3, 1), (3, 2)])
def test_i1_a_mirror_that_nobody_remembers_is_one_place_on_all_nodes(nodes: int, faults: int) -> None:
    assert first_wrong(nodes, faults) is None


PLANTED: dict[str, Callable[[dict[str, str | None], Places], Places]] = {
    "each node decides alone": lambda _here, _expected: {},
    "the first node believes no other": lambda _here, expected: {
        url: place for url, place in expected.items() if not place[0]
    },
    "of several places the first node's is taken": lambda here, expected: {
        url: place if place[0] != "" else (here[url] or None, "node 0") for url, place in expected.items()
    },
    "who cannot tell sees none": lambda _here, expected: {
        url: place for url, place in expected.items() if place[0] is not None
    },
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_planted_bugs_are_found(
    planted: Callable[[dict[str, str | None], Places], Places], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mirror_places.expected_places
    monkeypatch.setattr(mirror_places, "expected_places", lambda here, seen_by: planted(here, real(here, seen_by)))
    assert first_wrong(2, 2)


def test_a_node_that_makes_what_the_first_node_should_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_places, "expected_by_others", lambda _urls, expected: expected)
    assert first_wrong(2, 1) == "a node that is not the first makes a mirror"
