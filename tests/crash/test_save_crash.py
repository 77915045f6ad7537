"""SIGKILL at the crash points of a save: what was acknowledged stays, what was cut short was never there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, StoryServer, check, quick, run_campaign
from tests.crash.invariants import Place, newest_was_found, wrong_after_kill, wrong_after_recovery

ALWAYS = ("save.publish", "table.add_save", "table.release_save", "link.replace")


def after_recovery(place: Place) -> list[str]:
    return wrong_after_recovery(place) + newest_was_found(place)


def after_recovery_unmirrored(place: Place) -> list[str]:
    return wrong_after_recovery(place, mirrored=False) + newest_was_found(place)


CAMPAIGNS = {
    "a second save": Campaign(
        "prepare_one_mirrored", "save_one", "go_on", wrong_after_kill, after_recovery, always=ALWAYS
    ),
    "the same step again": Campaign(
        "prepare_one_mirrored", "save_same_step", "go_on", wrong_after_kill, after_recovery
    ),
    "without a mirror": Campaign(
        "prepare_unmirrored",
        "save_unmirrored",
        "go_on_unmirrored",
        wrong_after_kill,
        after_recovery_unmirrored,
        always=("save.publish",),
    ),
    "an emergency": Campaign("prepare_one_mirrored", "save_emergency", "go_on", wrong_after_kill, after_recovery),
    "an emergency with a copy": Campaign(
        "prepare_one_and_a_persistent_directory", "save_emergency", "go_on", wrong_after_kill, after_recovery
    ),
}


@pytest.mark.parametrize("name", quick(CAMPAIGNS, "an emergency"))
def test_a_save_killed_anywhere_keeps_what_was_acknowledged(
    name: str, servers: list[StoryServer], tmp_path: Path
) -> None:
    check(run_campaign(servers, CAMPAIGNS[name], tmp_path))
