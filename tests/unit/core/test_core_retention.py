"""Retention: what policy keeps, and that nothing goes which may be the only copy."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core.errors import ConfigError
from ckptmirror.core.retention import (
    MirrorSafety,
    Retention,
    Room,
    RotationPlan,
    SaveStatus,
    Shortage,
    next_save_bytes,
    plan_rotation,
    shortage,
)

SAFE = (MirrorSafety("gs://b/run", True, True, True),)
UNVERIFIED = (MirrorSafety("gs://b/run", True, False, False, "2 of 5 files pending"),)
UNCOMMITTED = (MirrorSafety("gs://b/run", True, True, False),)


def status(step: int, **changes: Any) -> SaveStatus:
    values: dict[str, Any] = {"save_id": f"s{step}", "attempt": "A", "number": 1, "kinds": ("dcp",), "safety": SAFE}
    return SaveStatus(step=step, **(values | changes))


def kept_steps(plan: RotationPlan) -> list[int]:
    return sorted(int(save_id[1:]) for save_id in plan.keep)


def test_keep_last_keeps_the_newest_steps_and_deletes_what_is_safe() -> None:
    plan = plan_rotation([status(step) for step in (100, 200, 300, 400)], Retention(keep_last=2))
    assert kept_steps(plan) == [300, 400]
    assert list(plan.delete) == ["s100", "s200"]
    assert plan.refuse == {}


def test_without_keep_last_every_step_is_kept() -> None:
    plan = plan_rotation([status(step) for step in (100, 200)], Retention())
    assert kept_steps(plan) == [100, 200]


def test_rotation_refuses_a_step_whose_upload_is_not_verified() -> None:
    plan = plan_rotation([status(100, safety=UNVERIFIED), status(200)], Retention(keep_last=1))
    assert plan.delete == {}
    assert plan.refuse == {"s100": "it is not verified on gs://b/run: 2 of 5 files pending"}


def test_rotation_refuses_a_step_whose_meta_is_not_committed() -> None:
    plan = plan_rotation([status(100, safety=UNCOMMITTED), status(200)], Retention(keep_last=1))
    assert plan.refuse == {"s100": "it is verified, but its meta is not committed on gs://b/run"}


def test_every_required_mirror_must_have_it_and_others_need_not() -> None:
    second = MirrorSafety("file:///nfs", True, False, False)
    optional = replace(second, required=False)
    saves = [status(100, safety=(*SAFE, second)), status(200, safety=(*SAFE, optional)), status(300)]
    plan = plan_rotation(saves, Retention(keep_last=1))
    assert list(plan.delete) == ["s200"]
    assert list(plan.refuse) == ["s100"]


def test_the_reason_of_a_deletion_says_which_required_mirror_does_not_have_the_save() -> None:
    bare = MirrorSafety("file:///nfs", True, True, True, "its meta is skipped: …", "is left without it")
    removed = MirrorSafety("gs://c/run", True, True, True, "", "has a tombstone of it")
    saves = [status(100), status(150, safety=(*SAFE, bare, removed)), status(200, safety=(removed,)), status(300)]
    assert plan_rotation(saves, Retention(keep_last=1)).delete == {
        "s100": "policy does not keep it; every required mirror has it",
        "s150": "policy does not keep it; every other required mirror has it; file:///nfs is left without it; "
        "gs://c/run has a tombstone of it",
        "s200": "policy does not keep it; gs://c/run has a tombstone of it",
    }


@pytest.mark.parametrize("safety", [(), (MirrorSafety("gs://b/run", False, True, True),)])
def test_without_a_required_mirror_nothing_is_deleted(safety: tuple[MirrorSafety, ...]) -> None:
    saves = [status(100, safety=safety), status(150, safety=safety, skipped=True), status(200, safety=safety)]
    plan = plan_rotation(saves, Retention(keep_last=1), abandoned={"s100"})
    assert plan.delete == {}
    assert list(plan.refuse) == ["s100", "s150"]
    assert "no required mirror" in plan.refuse["s100"]


def test_best_is_kept() -> None:
    losses = {100: 3.0, 200: 1.0, 300: 2.0, 400: 5.0, 500: 4.0}
    saves = [status(step, metrics={"val_loss": loss}) for step, loss in losses.items()]
    plan = plan_rotation(saves, Retention(keep_last=1, keep_best=1, metric="val_loss"))
    assert kept_steps(plan) == [200, 500]
    plan = plan_rotation(saves, Retention(keep_last=1, keep_best=2, metric="val_loss", mode="max"))
    assert kept_steps(plan) == [400, 500]
    plan = plan_rotation(saves, Retention(keep_last=1, keep_best=3, metric="val_loss"))
    assert kept_steps(plan) == [100, 200, 300, 500]


def test_of_equally_good_steps_the_newer_is_the_best() -> None:
    saves = [status(step, metrics={"acc": 1.0}) for step in (100, 200, 300)] + [status(400)]
    plan = plan_rotation(saves, Retention(keep_last=1, keep_best=1, metric="acc", mode="max"))
    assert kept_steps(plan) == [300, 400]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_and_infinities_are_never_the_best(odd: float, mode: Any) -> None:
    saves = [status(100, metrics={"loss": odd}), status(200, metrics={"loss": 1.0}), status(300)]
    plan = plan_rotation(saves, Retention(keep_last=1, keep_best=1, metric="loss", mode=mode))
    assert kept_steps(plan) == [200, 300]


def test_missing_best_is_a_soft_error() -> None:
    saves = [status(100), status(200), status(300, metrics={"other": 1.0})]
    plan = plan_rotation(saves, Retention(keep_last=2, keep_best=1, metric="val_loss"))
    assert plan.warnings == ("No save has the metric 'val_loss', so none is kept as the best.",)
    assert kept_steps(plan) == [200, 300]
    assert list(plan.delete) == ["s100"]
    assert plan_rotation([], Retention(keep_best=1, metric="val_loss")) == RotationPlan({}, {}, {})


def test_a_superseded_save_is_not_the_best() -> None:
    saves = [
        status(100, metrics={"loss": 0.1}, standing="superseded"),
        status(200, metrics={"loss": 2.0}),
        status(300, metrics={"loss": 3.0}),
    ]
    plan = plan_rotation(saves, Retention(keep_last=1, keep_best=1, metric="loss"))
    assert kept_steps(plan) == [200, 300]


def test_keep_every_keeps_steps_that_it_divides() -> None:
    plan = plan_rotation([status(step) for step in (0, 500, 750, 1000, 1250)], Retention(keep_last=1, keep_every=500))
    assert kept_steps(plan) == [0, 500, 1000, 1250]


def test_incomplete_steps_do_not_count_for_keep_last() -> None:
    saves = [status(100), status(200), status(300, whole=False), status(400, whole=False)]
    plan = plan_rotation(saves, Retention(keep_last=2))
    assert kept_steps(plan) == [100, 200, 300, 400]
    plan = plan_rotation([*saves, status(500)], Retention(keep_last=2))
    assert list(plan.delete) == ["s100"]


@pytest.mark.parametrize("standing", ["superseded", "replaced"])
def test_saves_off_the_lineage_do_not_count_for_keep_last(standing: Any) -> None:
    saves = [status(100), status(200)] + [status(step, standing=standing) for step in (300, 400, 500)]
    plan = plan_rotation(saves, Retention(keep_last=2))
    assert kept_steps(plan) == [100, 200]
    assert list(plan.delete) == ["s300", "s400", "s500"]


def test_steps_count_for_keep_last_not_saves() -> None:
    saves = [
        status(100),
        status(200, save_id="s2001"),
        status(200, save_id="s2002", kinds=("model",)),
        status(300, save_id="s3001"),
        status(300, save_id="s3002", kinds=("model",)),
    ]
    plan = plan_rotation(saves, Retention(keep_last=2))
    assert set(plan.keep) == {"s2001", "s2002", "s3001", "s3002"}
    assert list(plan.delete) == ["s100"]


def test_a_replaced_save_of_a_kept_step_may_go() -> None:
    saves = [status(200, save_id="s1", standing="replaced"), status(200, save_id="s2")]
    plan = plan_rotation(saves, Retention(keep_last=1))
    assert (list(plan.delete), list(plan.keep)) == (["s1"], ["s2"])


def test_a_step_counts_by_the_best_of_its_saves() -> None:
    saves = [
        status(100, save_id="s1", metrics={"loss": 1.0}),
        status(100, save_id="s2", kinds=("model",)),
        status(200, metrics={"loss": 2.0}),
        status(300, metrics={"loss": 3.0}),
    ]
    plan = plan_rotation(saves, Retention(keep_last=1, keep_best=1, metric="loss"))
    assert set(plan.keep) == {"s1", "s2", "s300"}


def test_unknown_saves_are_never_deleted() -> None:
    plan = plan_rotation([status(100, standing="unknown", skipped=True)], Retention(keep_last=1), abandoned={"s100"})
    assert list(plan.keep) == ["s100"]


@pytest.mark.parametrize("changes", [{"in_use": True}, {"pinned": True}])
def test_saves_in_use_or_pinned_are_kept(changes: dict[str, Any]) -> None:
    plan = plan_rotation([status(100, **changes), status(200)], Retention(keep_last=1))
    assert list(plan.keep) == ["s100", "s200"]


def test_a_save_that_policy_left_out_on_the_mirrors_may_go_but_not_the_newest() -> None:
    saves = [status(step, safety=UNVERIFIED, skipped=True) for step in (100, 200)]
    plan = plan_rotation(saves, Retention(keep_last=1))
    assert list(plan.delete) == ["s100"]
    assert list(plan.keep) == ["s200"]


def test_an_abandoned_save_goes_only_when_superseded_and_a_newer_one_is_safe() -> None:
    lost = status(100, standing="superseded", safety=UNVERIFIED)
    assert list(plan_rotation([lost, status(200)], Retention(keep_last=1), abandoned={"s100"}).delete) == ["s100"]
    assert list(plan_rotation([lost, status(200)], Retention(keep_last=1)).refuse) == ["s100"]
    unsafe = status(200, safety=UNVERIFIED)
    assert list(plan_rotation([lost, unsafe], Retention(keep_last=1), abandoned={"s100"}).refuse) == ["s100"]
    current = replace(lost, standing="current")
    assert list(plan_rotation([current, status(200)], Retention(keep_last=1), abandoned={"s100"}).refuse) == ["s100"]
    left_out = replace(current, skipped=True)  # its mirrors have this node's part
    assert list(plan_rotation([left_out, status(200)], Retention(keep_last=1), abandoned={"s100"}).delete) == ["s100"]


def test_an_emergency_snapshot_does_not_push_out_a_regular_step() -> None:
    saves = [status(100), status(200), status(250, kinds=("emergency",), safety=UNVERIFIED)]
    plan = plan_rotation(saves, Retention(keep_last=1))
    assert kept_steps(plan) == [200, 250]
    plan = plan_rotation([*saves, status(300)], Retention(keep_last=1))
    assert kept_steps(plan) == [300]


def test_an_emergency_snapshot_goes_once_a_newer_save_of_the_lineage_is_on_every_required_mirror() -> None:
    snapshot = status(250, kinds=("emergency",), safety=UNVERIFIED)
    plan = plan_rotation([status(200), snapshot, status(300)], Retention(keep_last=1))
    assert (list(plan.delete), plan.successors) == (["s200", "s250"], {"s250": "s300"})


@pytest.mark.parametrize(
    "newer",
    [
        {"safety": UNVERIFIED},
        {"safety": UNCOMMITTED},
        {"safety": (*SAFE, *UNVERIFIED)},
        {"standing": "superseded"},
        {"whole": False},
        {"kinds": ("emergency",)},
        {"step": 250, "save_id": "s250b"},
    ],
    ids=str,
)
def test_i1_an_emergency_snapshot_stays_without_a_newer_save_that_is_safe(newer: dict[str, Any]) -> None:
    snapshot = status(250, kinds=("emergency",), safety=UNVERIFIED)
    saves = [status(200), snapshot, status(**{"step": 300, **newer}), status(400, safety=UNVERIFIED)]
    plan = plan_rotation(saves, Retention(keep_last=1))
    assert "s250" not in plan.delete
    assert plan.successors == {}


def test_i1_a_superseded_emergency_snapshot_stays() -> None:
    snapshot = status(250, kinds=("emergency",), safety=UNVERIFIED, standing="superseded")
    plan = plan_rotation([snapshot, status(300)], Retention(keep_last=1))
    assert list(plan.refuse) == ["s250"]
    assert "training did not continue from it" in plan.refuse["s250"]


def test_an_abandoned_emergency_snapshot_goes_once_a_save_of_a_later_step_is_on_every_required_mirror() -> None:
    snapshot = status(250, kinds=("emergency",), safety=UNVERIFIED, standing="superseded")
    plan = plan_rotation([snapshot, status(200), status(300)], Retention(keep_last=1), abandoned={"s250"})
    assert (list(plan.delete), plan.successors) == (["s200", "s250"], {"s250": "s300"})
    assert "it is abandoned" in plan.delete["s250"]
    for other in (status(200), status(300, safety=UNVERIFIED)):  # the parent of the attempt that went on without it
        plan = plan_rotation([snapshot, other], Retention(keep_last=1), abandoned={"s250"})
        assert plan.refuse == {
            "s250": "it is an emergency snapshot, and no save of a later step is on every required mirror yet"
        }


def test_saves_that_share_an_id_are_kept() -> None:
    plan = plan_rotation([status(100), status(100), status(200)], Retention(keep_last=1))
    assert set(plan.keep) == {"s100", "s200"}


def test_rotation_property_random_mtimes_9_to_10_stale_higher_steps() -> None:
    """Order is that of integers on the lineage, not of names or times; a stale higher step counts for nothing."""
    rng = random.Random(9)
    for _ in range(200):
        current = [status(step) for step in (9, 10, 99, 100)]
        stale = [status(step, standing="superseded") for step in (1000, 5000)]
        saves = [*current, *stale]
        rng.shuffle(saves)  # as a directory listing, or times, might order them
        plan = plan_rotation(saves, Retention(keep_last=2))
        assert kept_steps(plan) == [99, 100]
        assert list(plan.delete) == ["s9", "s10", "s1000", "s5000"]


def test_no_ordering_by_wall_clock() -> None:
    assert not [name for name in SaveStatus.__dataclass_fields__ if "time" in name or "utc" in name or "date" in name]


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_last": True},
        {"keep_last": 1.5},
        {"keep_every": 0},
        {"keep_best": -1, "metric": "loss"},
        {"keep_best": None},
        {"keep_best": 1},
        {"metric": "loss"},
        {"metric": "", "keep_best": 1},
        {"mode": "best"},
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Retention(**wrong)


# -- a disk that is short of space ------------------------------------------------------------------------------

SHORT, ROOMY = Room(free_bytes=99, needed_bytes=100), Room(free_bytes=100, needed_bytes=100)


def early_steps(saves: list[SaveStatus], **policy: Any) -> list[int]:
    return [int(save_id[1:]) for save_id in plan_rotation(saves, Retention(**policy)).early]


def test_while_the_disk_is_short_the_oldest_safe_saves_go_early_one_after_another_until_there_is_room() -> None:
    plan = plan_rotation([status(step) for step in (100, 200, 300, 400)], Retention(keep_last=3, keep_every=100))
    assert kept_steps(plan) == [100, 200, 300, 400]
    assert plan.next_early(SHORT, []) == "s100"
    assert plan.next_early(ROOMY, []) is None
    assert plan.next_early(SHORT, ["s100"]) == "s200"
    assert plan.next_early(ROOMY, ["s100"]) is None
    assert plan.next_early(SHORT, ["s100", "s200", "s300"]) is None


@pytest.mark.parametrize(
    "stays",
    [
        {"safety": UNVERIFIED},
        {"safety": UNCOMMITTED},
        {"safety": ()},
        {"skipped": True, "safety": UNVERIFIED},
        {"pinned": True},
        {"in_use": True},
        {"whole": False},
        {"standing": "unknown"},
        {"metrics": {"loss": 1.0}},
    ],
    ids=str,
)
def test_i1_what_is_not_safe_or_is_wanted_for_itself_does_not_go_early(stays: dict[str, Any]) -> None:
    saves = [status(100, **stays), status(200), status(300), status(400, metrics={"loss": 2.0})]
    assert early_steps(saves, keep_last=4, keep_best=1, metric="loss") == [200, 300]


def test_the_newest_save_does_not_go_early_nor_the_one_below_a_snapshot_nor_any_where_every_step_is_kept() -> None:
    saves = [status(100), status(200), status(250, kinds=("emergency",), safety=UNVERIFIED)]
    assert early_steps(saves, keep_last=2) == [100]
    assert early_steps(saves) == []
    assert early_steps([status(100)], keep_last=1) == []


def test_the_next_save_needs_what_the_newest_step_took_and_some_more() -> None:
    mib = 1024 * 1024
    saves = [
        status(100, size_bytes=900 * mib),
        status(200, save_id="s1", size_bytes=100 * mib),
        status(200, save_id="s2", kinds=("model",), size_bytes=20 * mib),
        status(200, save_id="s3", size_bytes=500 * mib, standing="replaced"),
        status(250, size_bytes=700 * mib, kinds=("emergency",)),
        status(300, size_bytes=800 * mib, whole=False),
    ]
    assert next_save_bytes(saves) == (120 + 6 + 1) * mib
    assert next_save_bytes(saves[-2:]) == 0


# -- a disk that is too small -----------------------------------------------------------------------------------

GIB = 1024**3
MARGIN = GIB // 20 + 1024**2


def shortage_of(saves: list[SaveStatus], free_bytes: int, *, mirrored: bool = True, **policy: Any) -> Shortage | None:
    return shortage(saves, Retention(**policy), has_required=mirrored, save_bytes=GIB, free_bytes=free_bytes)


def test_a_disk_has_to_hold_keep_last_saves_and_one_more() -> None:
    assert shortage_of([], 3 * GIB + MARGIN, keep_last=2) is None
    assert shortage_of([], 3 * GIB, keep_last=2) == Shortage(3, 3 * GIB + MARGIN, 3 * GIB, 0)
    unknown = shortage([], Retention(keep_last=2), has_required=True, save_bytes=0, free_bytes=0)
    assert unknown is None


def test_saves_that_are_there_count_as_room_where_rotation_may_delete_them() -> None:
    there = [
        status(100, size_bytes=GIB, standing="superseded"),
        status(200, size_bytes=GIB),
        status(300, size_bytes=GIB, safety=UNVERIFIED),
    ]
    assert shortage_of(there, MARGIN, keep_last=2) is None
    found = shortage_of(there, MARGIN - 1, keep_last=2)
    assert found is not None
    assert found.freeable_bytes == 3 * GIB
    for stays in ({"pinned": True}, {"in_use": True}, {"standing": "unknown"}, {"whole": False}, {"step": 1000}):
        held = [*there[:2], replace(there[2], **stays)]
        found = shortage_of(held, MARGIN, keep_last=2, keep_every=1000)
        assert found is not None
        assert found.freeable_bytes == 2 * GIB
    best = [*there[:2], replace(there[2], metrics={"loss": 1.0})]
    assert shortage_of(best, MARGIN, keep_last=2, keep_best=1, metric="loss") is not None


@pytest.mark.parametrize(("mirrored", "keep_last"), [(False, 2), (True, None)])
def test_where_nothing_is_ever_deleted_only_the_next_save_counts(mirrored: bool, keep_last: int | None) -> None:
    there = [status(100, size_bytes=GIB)]
    assert shortage_of(there, GIB + MARGIN, mirrored=mirrored, keep_last=keep_last) is None
    found = shortage_of(there, GIB, mirrored=mirrored, keep_last=keep_last)
    assert found == Shortage(1, GIB + MARGIN, GIB, 0)


# -- any saves ----------------------------------------------------------------------------------------------

safeties = st.lists(
    st.builds(
        MirrorSafety, st.sampled_from(["gs://b/run", "file:///nfs"]), st.booleans(), st.booleans(), st.booleans()
    ),
    max_size=3,
).map(tuple)
metrics = st.dictionaries(st.just("loss"), st.floats(), max_size=1)
statuses = st.builds(
    SaveStatus,
    save_id=st.uuids().map(lambda value: value.hex),
    step=st.integers(0, 12),
    attempt=st.just("A"),
    number=st.integers(1, 9),
    kinds=st.sampled_from([("dcp",), ("model",), ("dcp", "model"), ("emergency",)]),
    metrics=metrics,
    standing=st.sampled_from(["current", "current", "replaced", "superseded", "unknown"]),
    safety=safeties | st.just(SAFE),
    skipped=st.booleans(),
    in_use=st.booleans(),
    pinned=st.booleans(),
    whole=st.sampled_from([True, True, True, False]),
    size_bytes=st.integers(0, 10**12),
)
policies = st.builds(
    Retention,
    keep_last=st.none() | st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 5),
    keep_best=st.integers(1, 3),
    metric=st.just("loss"),
    mode=st.sampled_from(["min", "max"]),
)


def _is_safe(save: SaveStatus) -> bool:
    return all(safety.verified and safety.committed for safety in save.safety if safety.required)


@given(st.lists(statuses, max_size=12), policies, st.data())
def test_nothing_is_deleted_that_is_not_verified_and_committed_on_every_required_mirror(
    saves: list[SaveStatus], retention: Retention, data: st.DataObject
) -> None:
    abandoned = data.draw(st.sets(st.sampled_from([s.save_id for s in saves]))) if saves else set()
    plan = plan_rotation(saves, retention, abandoned=abandoned)
    for save in saves:
        if save.save_id in plan.delete:
            required = [safety for safety in save.safety if safety.required]
            assert required
            safe = all(safety.verified and safety.committed for safety in required)
            stands_in = [s for s in saves if s.save_id == plan.successors.get(save.save_id)]
            assert all(s.step > save.step and s.standing == "current" and _is_safe(s) for s in stands_in)
            is_abandoned = save.save_id in abandoned and save.standing == "superseded"
            assert safe or save.skipped or is_abandoned or (stands_in and save.kinds == ("emergency",))
            assert save.whole
            assert not save.in_use
            assert not save.pinned
            assert save.standing != "unknown"


@given(st.lists(statuses, max_size=12), policies)
def test_the_newest_and_the_best_of_the_lineage_are_kept(saves: list[SaveStatus], retention: Retention) -> None:
    plan = plan_rotation(saves, retention)
    counted = [save for save in saves if save.standing == "current" and save.whole]
    if counted:
        newest = max(save.step for save in counted)
        assert all(save.save_id in plan.keep for save in counted if save.step == newest)
    values = [v for save in counted if (v := save.metrics.get("loss")) is not None and abs(v) < float("inf")]
    if values:
        best = min(values) if retention.mode == "min" else max(values)
        assert any(save.metrics.get("loss") == best and save.save_id in plan.keep for save in counted)


@given(st.lists(statuses, max_size=12), policies)
def test_keep_last_keeps_that_many_steps_of_the_lineage(saves: list[SaveStatus], retention: Retention) -> None:
    plan = plan_rotation(saves, retention)
    counted = [s for s in saves if s.standing == "current" and s.whole and s.kinds != ("emergency",)]
    steps = sorted({save.step for save in counted}, reverse=True)[: retention.keep_last]
    assert all(save.save_id in plan.keep for save in counted if save.step in steps)


@given(st.lists(statuses, max_size=12), policies, st.randoms(use_true_random=False))
def test_the_plan_places_every_save_once_with_a_reason_whatever_the_order(
    saves: list[SaveStatus], retention: Retention, rng: random.Random
) -> None:
    plan = plan_rotation(saves, retention)
    everything = [*plan.keep, *plan.delete, *plan.refuse]
    assert sorted(everything) == sorted(save.save_id for save in saves)
    assert all(reason for group in (plan.keep, plan.delete, plan.refuse) for reason in group.values())
    rng.shuffle(saves)
    again = plan_rotation(saves, retention)
    assert again == plan
    assert [list(again.keep), list(again.delete)] == [list(plan.keep), list(plan.delete)]


@given(st.lists(statuses, max_size=12), policies)
def test_rotating_twice_deletes_nothing_more(saves: list[SaveStatus], retention: Retention) -> None:
    plan = plan_rotation(saves, retention)
    left = [save for save in saves if save.save_id not in plan.delete]
    assert plan_rotation(left, retention).delete == {}


@given(st.lists(statuses, max_size=12), policies)
def test_what_goes_early_is_kept_by_a_number_alone_and_is_safe(saves: list[SaveStatus], retention: Retention) -> None:
    plan = plan_rotation(saves, retention)
    by_id = {save.save_id: save for save in saves}
    assert [by_id[one].step for one in plan.early] == sorted(by_id[one].step for one in plan.early)
    counted = [save for save in saves if save.standing == "current" and save.whole]
    left = [save for save in saves if save.save_id not in plan.early]
    for save_id in plan.early:
        save = by_id[save_id]
        assert save_id in plan.keep
        assert retention.keep_last is not None
        assert any(safety.required for safety in save.safety)
        assert _is_safe(save)
        assert save in counted
        assert not save.in_use
        assert not save.pinned
        assert save.step < max(one.step for one in counted)
    # the newest and the best are still those that they were
    again = plan_rotation(left, retention)
    assert {one for one in again.keep if "among the best" in again.keep[one]} >= {
        one for one in plan.keep if "among the best" in plan.keep[one]
    }
    if counted:
        assert max(save.step for save in counted) in {save.step for save in left}


@given(st.lists(statuses, max_size=12), policies, st.integers(0, 10**13))
def test_no_more_goes_early_than_the_next_save_needs(
    saves: list[SaveStatus], retention: Retention, free_bytes: int
) -> None:
    plan = plan_rotation(saves, retention)
    sizes_bytes = {save.save_id: save.size_bytes for save in saves}
    room, went = Room(free_bytes, next_save_bytes(saves)), []
    while (one := plan.next_early(room, went)) is not None:
        went.append(one)
        room = replace(room, free_bytes=room.free_bytes + sizes_bytes[one])
    assert tuple(went) == plan.early[: len(went)]
    if went:
        assert room.free_bytes - sizes_bytes[went[-1]] < room.needed_bytes
    assert not room.is_short or tuple(went) == plan.early
