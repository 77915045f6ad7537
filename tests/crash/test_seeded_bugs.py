"""Plants known bugs one at a time and demands that the checks of the campaigns notice each: in the full campaign."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.campaign import FULL, StoryServer
from tests.crash.invariants import Place, wrong_after_kill, wrong_after_recovery
from tests.crash.seeded_bugs import BUGS
from tests.kit.faults import flip_bit

pytestmark = pytest.mark.skipif(not FULL, reason="`make campaign` tests the checks themselves")


def nothing(place: Place) -> None:
    """Change nothing."""


def rot_the_source(place: Place) -> None:
    flip_bit(place.root / "model_000200.pt")


def rot_the_copy(place: Place) -> None:
    flip_bit(place.root / "dcp_000100" / "__0_0.distcp")
    flip_bit(place.root / "model_000100.pt")


def wrong_on_mirror(place: Place) -> list[str]:
    """The local copy was made to rot; the mirror must not have got that."""
    return [what for what in wrong_after_kill(place) if "in mirror" in what or "the mirror" in what]


def put_own_file_there(place: Place) -> None:
    """After the kill, a person puts another file where the save would have gone."""
    (place.root / "model_000200.pt").write_bytes(b"precious")


def own_file_is_gone(place: Place) -> list[str]:
    mine = place.root / "model_000200.pt"
    return [] if mine.exists() and mine.read_bytes() == b"precious" else ["a person's file was removed"]


def after_recovery(place: Place) -> list[str]:
    """All that matters after a recovery, but for the rot that was planted before."""
    return [what for what in wrong_after_recovery(place) if "its bytes differ" not in what]


@dataclass(frozen=True)
class Case:
    """How a bug is brought to light.

    Attributes:
        kills: Points to die at, one run each; "" runs the story to its end.
        between: What happens after the kill, before the recovery.
        recover: The story of the next start; "" for none.
    """

    prepare: str
    story: str
    kills: Sequence[str]
    disturb: Callable[[Place], None] = nothing
    after_kill: Callable[[Place], list[str]] = wrong_after_kill
    between: Callable[[Place], None] = nothing
    recover: str = ""
    after: Callable[[Place], list[str]] = after_recovery


CASES = {
    "the_meta_is_written_first": Case("prepare_one_mirrored", "save_one", ["save.publish:before@1"]),
    "a_save_replaces_another": Case("prepare_one_mirrored_locally", "save_same_step", [""]),
    "latest_is_swapped_before_the_commit": Case("prepare_one_mirrored", "save_one", ["save.publish:after@2"]),
    "nothing_of_a_cut_short_save_is_removed": Case(
        "prepare_one_mirrored", "save_one", ["save.publish:after@2"], recover="go_on"
    ),
    "whatever_has_the_name_is_removed": Case(
        "prepare_one_mirrored",
        "save_one",
        ["save.publish:after@1"],
        between=put_own_file_there,
        recover="go_on",
        after=own_file_is_gone,
    ),
    "records_are_verified_before_the_upload": Case("prepare_one_pending", "upload", [""]),
    "the_mirrors_meta_goes_first": Case("prepare_one_pending", "upload", ["table.verify:after@2"]),
    "what_arrives_is_not_compared": Case(
        "prepare_one_pending", "upload_or_fail", [""], disturb=rot_the_source, after_kill=wrong_on_mirror
    ),
    "rotation_is_blind": Case("prepare_three_pending", "rotate_unmirrored", [""]),
    "rotation_deletes_in_place": Case("prepare_three_mirrored", "rotate", ["trash.rename:after@1"]),
    "an_interrupted_rotation_is_forgotten": Case(
        "prepare_three_mirrored", "rotate", ["trash.rename:after@2"], recover="look_only"
    ),
    "a_repair_that_was_cut_short_is_forgotten": Case(
        "prepare_one_mirrored",
        "resume",
        ["dir.publish:after@1"],
        disturb=rot_the_copy,
        after_kill=lambda _place: [],
        recover="go_on",
        after=wrong_after_recovery,
    ),
}


def judge(server: StoryServer, case: Case, directory: Path, bug: str | None) -> list[str]:
    """Say what the checks find wrong."""
    wrong = []
    for kill in case.kills:
        place = Place(directory / "place")
        place.path.mkdir(parents=True)
        server.tell(case.prepare, place.path)
        case.disturb(place)
        try:
            server.tell(case.story, place.path, kill or None, bug=bug)
            wrong += case.after_kill(place)
            case.between(place)
            if case.recover:
                server.tell(case.recover, place.path, bug=bug)
                wrong += case.after(place)
        except AssertionError as error:
            wrong.append(str(error))
        shutil.rmtree(place.path)
    return wrong


def test_there_is_a_case_for_every_bug() -> None:
    assert CASES.keys() == BUGS.keys()


@pytest.mark.parametrize("bug", CASES)
def test_a_planted_bug_is_noticed_and_without_it_all_is_well(
    bug: str, servers: list[StoryServer], tmp_path: Path
) -> None:
    assert judge(servers[0], CASES[bug], tmp_path / "sound", None) == []
    assert judge(servers[0], CASES[bug], tmp_path / "planted", bug) != []
