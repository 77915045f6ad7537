"""SIGKILL at the crash points of uploads: the next start carries on, and no mirror ever names what is not whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, StoryServer, check, quick, run_campaign
from tests.crash.invariants import Place, newest_was_found, wrong_after_kill, wrong_after_recovery

pytestmark = pytest.mark.long


def after_recovery(place: Place) -> list[str]:
    return wrong_after_recovery(place) + newest_was_found(place)


CAMPAIGNS = {
    "a pending save": Campaign(
        "prepare_one_pending",
        "upload",
        "go_on",
        wrong_after_kill,
        after_recovery,
        always=("mirror.link", "table.verify"),
    ),
    "a lost table": Campaign(
        "prepare_one_mirrored",
        "upload",
        "go_on",
        wrong_after_kill,
        after_recovery,
        disturb=lambda place: [path.unlink() for path in (place.root / ".ckptmirror").glob("uploads.db*")].clear(),
        always=("table.publish",),
    ),
}


@pytest.mark.parametrize("name", quick(CAMPAIGNS, "a pending save"))
def test_an_upload_killed_anywhere_is_carried_on_by_the_next_start(
    name: str, servers: list[StoryServer], tmp_path: Path
) -> None:
    check(run_campaign(servers, CAMPAIGNS[name], tmp_path))
