"""Situations in which a start of 0.1.0 lost training: each with what it did then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptmirror.core.errors import RefusedOnlyCopy, StoreTemporary, UsageError
from ckptmirror.core.start.decide import Result, Wish
from tests.unit.core.core_builders import required
from tests.unit.core.start.builders import (
    BOTH,
    KEPT,
    OTHER_RUN,
    THERE,
    Case,
    M,
    N,
    O,
    broken,
    by,
    disk,
    dropped,
    kept,
    mirror,
    refuses,
    silent,
    tries,
    went_wrong,
)

a = by("a", 0)
a100, a200, a500 = (a.save(step, *BOTH) for step in (100, 200, 500))
restart = by("restart", 1, after=a100, root=THERE)
r500 = restart.save(500)
snapshot = replace(a.save(150, "emergency"), ranks=2)

DEFECTS = [
    Case(  # it claimed first, and the healthy trainer was fenced
        "a mistyped policy claims nothing",
        [disk(), mirror(M, [a], [a100])],
        refuses(UsageError, "'lastest' is neither a step, nor 'latest'"),
        Wish("lastest"),
    ),
    Case(  # 100 was resumed, without a word
        "an attempt that died before its first save does not supersede a later save of its predecessor",
        [disk(), mirror(M, [a, restart], [a100, a200])],
        tries(a200, M),
    ),
    Case(  # the start with one rank resumed 100, and the snapshot was superseded for good
        "an emergency snapshot of two ranks is not lost to one start with one",
        [disk([a], saved=[a100, snapshot])],
        refuses(RefusedOnlyCopy, "Start with 2 ranks"),
        tried=[went_wrong(snapshot, "disk", Result.OTHER_RANKS, "emergency")],
    ),
    Case(  # step 0
        "the whole run is on an optional mirror that does not answer",
        [disk(), mirror(M), silent(O)],
        refuses(StoreTemporary, O, "step 0 might fork the run"),
    ),
    Case(  # step 0
        "the whole run is on a required mirror that is no longer configured",
        [disk(), mirror(M), dropped(N)],
        refuses(StoreTemporary, f"{N} is no longer configured", f"ckptmirror forget-mirror --url {N}"),
    ),
    Case(  # 100 was resumed; 500 is on M
        "mirrors [M, N] became [N], which was away while the run went on",
        [disk([a], saved=[a100]), mirror(N, [a, restart], [a100], requirements=required(M, N)), dropped(M)],
        refuses(StoreTemporary, "attempt 1", "may since have saved", M),
    ),
    Case(  # the same on a new disk, which knows of M by N's list alone
        "mirrors [M, N] became [N] on a new disk",
        [disk(), mirror(N, [a], [a100], requirements=required(M, N))],
        refuses(StoreTemporary, "Step 100, the newest that can be seen, is not on this disk", M),
    ),
    Case(  # it went on from 100, and superseded what is on the mirror
        "a root restored from an older copy does not go on while the mirror is silent",
        [disk([replace(a, attempt=replace(a.attempt, root=THERE))], copied=[a100]), silent(M)],
        refuses(StoreTemporary, "may have come from elsewhere"),
    ),
    Case(  # 100 was resumed, and 200 never named
        "when a list is lost, the metas of broken saves testify",
        [disk(), mirror(M, None, [a100], damaged=[broken(by("b", 1, after=a100).save(200))])],
        tries(a100, M, says="step 200 (meta_000200.json): torn"),
    ),
    Case(  # another's weights, under this run's id
        "two runs in one persistent directory do not mix",
        [disk([a], saved=[a100]), kept(by("other", 5).save(900, "emergency"), run=OTHER_RUN)],
        tries(a100, says="snapshots of another run"),
    ),
    Case(  # another's weights, under another's id
        "on a new disk neither is taken for this one",
        [disk(), kept(snapshot), kept(by("other", 5).save(900, "emergency"), run=OTHER_RUN)],
        refuses(RefusedOnlyCopy, f"{KEPT} has an emergency snapshot of step 900"),
    ),
    Case(  # 100 was resumed
        "a save of two kinds with one damaged file of kind model is resumed in its whole kind dcp",
        [disk([a], saved=[a100, a200.only("dcp")], damaged=[broken(a200, kinds=("model",))])],
        tries(a200, kind="dcp"),
    ),
]


@pytest.mark.parametrize("case", DEFECTS, ids=lambda case: case.name)
def test_no_training_is_lost_where(case: Case) -> None:
    case.check()
