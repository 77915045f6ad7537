"""SIGKILL at the crash points of a rotation: nothing goes that is not on the mirror, and the next start finishes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, StoryServer, check, run_campaign
from tests.crash.invariants import Place, newest_was_found, wrong_after_kill, wrong_after_recovery

pytestmark = pytest.mark.long


def after_recovery(place: Place) -> list[str]:
    wrong = wrong_after_recovery(place) + newest_was_found(place)
    left = sorted(meta.step for meta in place.local().saves.values())
    return wrong if left == [300] else [*wrong, f"steps {left} are left; keep_last is 1"]


def test_a_rotation_killed_anywhere_loses_nothing_and_is_finished_by_the_next_start(
    servers: list[StoryServer], tmp_path: Path
) -> None:
    campaign = Campaign(
        "prepare_three_mirrored",
        "rotate",
        "look_only",
        wrong_after_kill,
        after_recovery,
        always=("trash.rename", "table.forget_save"),
    )
    check(run_campaign(servers, campaign, tmp_path))
