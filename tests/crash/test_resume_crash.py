"""SIGKILL at the crash points of a start: whatever it had begun, the next start finds the newest save and goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, StoryServer, check, quick, run_campaign
from tests.crash.invariants import Place, newest_was_found, wrong_after_kill, wrong_after_recovery
from tests.kit.faults import flip_bit


def lose_the_disk(place: Place) -> None:
    shutil.rmtree(place.root)


def lose_the_control_directory(place: Place) -> None:
    shutil.rmtree(place.root / ".ckptmirror")


def let_bits_rot(place: Place) -> None:
    flip_bit(place.root / "dcp_000100" / "__0_0.distcp")
    flip_bit(place.root / "model_000100.pt")


def after_kill_without_disk(place: Place) -> list[str]:
    """The root was taken away before; until the start makes it anew there is nothing to judge."""
    return wrong_after_kill(place) if place.root.is_dir() else []


def after_kill_of_rot(place: Place) -> list[str]:
    """The rotten copy was advertised before, since sizes cannot tell; while it makes room nothing lists it."""
    expected = ("its bytes differ", "latest names dcp_000100", "a meta without its files: meta_000100.json")
    return [what for what in wrong_after_kill(place) if not any(part in what for part in expected)]


def after_recovery(place: Place) -> list[str]:
    return wrong_after_recovery(place) + newest_was_found(place)


def after_recovery_unmirrored(place: Place) -> list[str]:
    return wrong_after_recovery(place, mirrored=False) + newest_was_found(place)


def after_rewind(place: Place) -> list[str]:
    """The start after a rewind that was cut short goes on either from where it was, or from the rewind's side."""
    found = json.loads((place.path / "found.json").read_text())
    promised = {promise["step"] for promise in place.promises()}
    wrong = wrong_after_recovery(place)
    if 150 in promised and found != 150:
        wrong.append(f"step 150 was acknowledged after the rewind, but {found} was resumed")
    return wrong if found in (100, 150, 300) else [*wrong, f"resumed from {found}"]


CAMPAIGNS = {
    "the very first start": Campaign("prepare_nothing", "first_start", "go_on", wrong_after_kill, after_recovery),
    "the disk is lost": Campaign(
        "prepare_one_mirrored",
        "resume",
        "go_on",
        after_kill_without_disk,
        after_recovery,
        disturb=lose_the_disk,
    ),
    "bits rotted": Campaign(
        "prepare_one_mirrored",
        "resume",
        "go_on",
        after_kill_of_rot,
        after_recovery,
        disturb=let_bits_rot,
        always=("dir.publish", "trash.rename"),
    ),
    "the disk is lost, and a snapshot has a copy": Campaign(
        "prepare_kept_snapshot",
        "resume",
        "go_on",
        after_kill_without_disk,
        after_recovery,
        disturb=lose_the_disk,
        always=("dir.publish",),
    ),
    "the control directory is lost": Campaign(
        "prepare_three_mirrored",
        "resume",
        "go_on",
        wrong_after_kill,
        after_recovery,
        disturb=lose_the_control_directory,
    ),
    "a save was cut short": Campaign(
        "prepare_one_mirrored",
        "resume",
        "go_on",
        wrong_after_kill,
        after_recovery,
        always=("trash.rename", "table.discard_unreleased"),
        cut_short=("save_one", "save.publish:after@3"),
    ),
    "a save without a mirror was cut short": Campaign(
        "prepare_unmirrored",
        "resume_unmirrored",
        "go_on_unmirrored",
        wrong_after_kill,
        after_recovery_unmirrored,
        cut_short=("save_unmirrored", "save.publish:after@3"),
    ),
    "a rotation was cut short": Campaign(
        "prepare_three_mirrored",
        "rotate",
        "look_only",
        wrong_after_kill,
        after_recovery,
        always=("trash.rename", "table.forget_save"),
        cut_short=("rotate", "trash.rename:after@2"),
    ),
    "a repair was cut short": Campaign(
        "prepare_one_mirrored",
        "resume",
        "go_on",
        after_kill_of_rot,
        after_recovery,
        disturb=let_bits_rot,
        always=("trash.rename",),
        cut_short=("resume", "trash.rename:after@1"),
    ),
    "a rewind": Campaign("prepare_three_mirrored", "rewind", "go_on", wrong_after_kill, after_rewind),
}


@pytest.mark.parametrize("name", quick(CAMPAIGNS, "the disk is lost", "a save was cut short"))
def test_a_start_killed_anywhere_is_followed_by_one_that_goes_on(
    name: str, servers: list[StoryServer], tmp_path: Path
) -> None:
    check(run_campaign(servers, CAMPAIGNS[name], tmp_path))
