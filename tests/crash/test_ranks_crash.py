"""SIGKILL of one of two ranks at the moments of a save that matter: no half of it is ever advertised."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.crash.campaign import FULL, SEED, StoryServer, named_points, restored
from tests.crash.invariants import Place, newest_was_found, wrong_after_kill, wrong_after_recovery

pytestmark = pytest.mark.long

RANKS = 2


def counted(points: list[str]) -> str:
    """The last of these points that has the same number each time: not what two that write share, nor the journal's."""
    return next(point for point in reversed(points) if not point.startswith(("dir.fsync", "line.append")))


LEADER_MOMENTS = {
    "before anything": lambda points: points[0],
    "while writing": lambda _: "file.write:before@2",
    "between the reports": lambda points: counted(points[: points.index("table.add_save:before@1")]),
    "after the records": lambda _: "table.add_save:after@1",
    "between two names": lambda _: "save.publish:after@2",
    "before the meta": lambda points: counted(points[: points.index("table.release_save:before@1") - 4]),
    "after the meta": lambda _: "table.release_save:before@1",
    "after the release": lambda _: "table.release_save:after@1",
    "after all": counted,
}
OTHER_MOMENTS = {
    "before anything": lambda points: points[0],
    "while writing": lambda _: "file.write:before@2",
    "when its files are sealed": counted,
}
CASES = [(0, moment) for moment in LEADER_MOMENTS] + [(1, moment) for moment in OTHER_MOMENTS]


@pytest.fixture(scope="module")
def prepared(servers: list[StoryServer], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """A place after a first save of two ranks, and the points that each rank passes in the second."""
    directory = tmp_path_factory.mktemp("ranks")
    case = directory / "case"
    case.mkdir()
    servers[0].tell("prepare_one_mirrored", case, ranks=RANKS)
    case.rename(directory / "prepared")
    with restored(directory / "prepared", case):
        servers[0].tell("save_one", case, count=True, ranks=RANKS)
        assert wrong_after_kill(Place(case)) == []
        points = [named_points(json.loads((case / f"points{rank}.json").read_text())) for rank in range(RANKS)]
    return directory, points


@pytest.mark.parametrize(("rank", "moment"), CASES if FULL else [c for i, c in enumerate(CASES) if (i + SEED) % 3 == 0])
def test_one_rank_killed_while_saving_leaves_a_whole_save_or_none(
    rank: int, moment: str, servers: list[StoryServer], prepared: tuple[Path, list[list[str]]]
) -> None:
    directory, points = prepared
    place = Place(directory / "case")
    point = (OTHER_MOMENTS if rank else LEADER_MOMENTS)[moment](points[rank])
    with restored(directory / "prepared", place.path):
        ended = servers[0].tell("save_one", place.path, point, ranks=RANKS, killed_rank=rank)
        assert ended == signal.SIGKILL, f"{point} was not reached by rank {rank}"
        assert wrong_after_kill(place) == [], f"rank {rank} killed at {point}"
        servers[0].tell("go_on", place.path, ranks=RANKS)
        assert wrong_after_recovery(place) + newest_was_found(place) == [], f"rank {rank} killed at {point}"
