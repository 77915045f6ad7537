"""SIGKILL at the crash points of a rewind: recorded or not, nothing is lost, and the same call completes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.flow.drain import drain
from ckptmirror.flow.places.attempt_lists import read_local_attempts
from ckptmirror.flow.places.resolve import list_checkpoints
from ckptmirror.flow.start.rewind import rewind
from ckptmirror.flow.verify.verify import Target, verify
from ckptmirror.local import crashpoints
from tests.kit.processes import in_child
from tests.kit.roots import make_pending

pytestmark = pytest.mark.long

FULL = os.environ.get("CKPTMIRROR_CAMPAIGN") == "full"
CASES_IN_A_SLICE = 12
BEFORE = {200: "current", 300: "current"}
AFTER = {100: "current", 200: "superseded", 300: "superseded"}


def standings(place: Path | str) -> dict[int, str]:
    return {line.step: line.standing for line in list_checkpoints(place)}


def check_nothing_is_lost(root: Path, url: str) -> None:
    """Every save is whole, here and there; each says one thing or the other, never a mixture.

    The root names the attempt before the mirror does, and believes it once it has seen that the mirror took it.
    """
    here, there = standings(root), standings(url)
    assert here in (BEFORE, {**BEFORE, 100: "current"}, AFTER)
    assert there in ({100: "current", **BEFORE}, AFTER)
    known = read_local_attempts(root)
    assert known is not None
    assert there != AFTER or any(one.by_person for one in known.attempts), "the mirror was told before the root"
    assert not (here == AFTER and there != AFTER), "the root believes what no mirror took"
    found = verify(Target(root, (url,)), deep=True)
    assert {save.verdict.state for save in found.saves} == {"whole"}


def test_a_rewind_killed_anywhere_is_recorded_or_not_and_is_completed_by_the_next(tmp_path: Path) -> None:
    place, prepared, url = tmp_path / "place", tmp_path / "prepared", f"file://{tmp_path}/place/mirror"
    root, metas = make_pending(place, url, 100, 200, 300, kinds=("model",))
    assert drain(root, timeout_s=60.0).is_verified
    for artifact in metas[0].artifacts:  # rotated away: the rewind brings it from the mirror
        (root / artifact.path).unlink()
    (root / names.SaveName(100).meta).unlink()
    place.rename(prepared)
    report = tmp_path / "points.json"

    def count() -> None:
        crashpoints.arm()
        rewind(root, 100)
        report.write_text(json.dumps(crashpoints.passed()))

    shutil.copytree(prepared, place, symlinks=True)
    assert in_child(count) == 0
    points = json.loads(report.read_text())
    assert standings(root) == standings(url) == AFTER
    assert len(points) > 40
    # The last points are where the list of the root, then that of the mirror is replaced: all of them are always tried.
    stride = 1 if FULL else len(points) // CASES_IN_A_SLICE
    for number in sorted({*range(1, len(points) + 1, stride), *range(len(points) - 20, len(points) + 1)}):
        shutil.rmtree(place)
        shutil.copytree(prepared, place, symlinks=True)

        def die(at: int = number) -> None:
            crashpoints.arm(str(at))
            rewind(root, 100)

        status = in_child(die)
        assert os.WIFSIGNALED(status), f"point {number} ({points[number - 1]}) was not reached"
        assert os.WTERMSIG(status) == signal.SIGKILL
        check_nothing_is_lost(root, url)
        assert rewind(root, 100).recorded_on == (url,)
        assert standings(root) == standings(url) == AFTER
        assert drain(root, timeout_s=60.0).is_verified
        check_nothing_is_lost(root, url)
