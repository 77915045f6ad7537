"""Staging: what arrives from a mirror, under which names, and what becomes of what is there already."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.errors import (
    CheckpointNotFound,
    DestinationOccupied,
    KindMismatch,
    RefusedOnlyCopy,
    RootLocked,
    UsageError,
)
from ckptmirror.core.meta_merging import merge_parts
from ckptmirror.core.model import Kind
from ckptmirror.core.names import tmp_name
from ckptmirror.flow.fetch import blocks, destination, stage
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from ckptmirror.flow.fetch.stage_progress import StageProgress
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.places.resolve import find_local_checkpoint_steps
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.lock import RootLock
from tests.kit.faults import flip_bit
from tests.kit.mirrors import SpyStore
from tests.kit.roots import MIB, Place, names_in, whole_saves
from tests.kit.saves import FIRST_ATTEMPT, bytes_of, make_attempt, make_save, put_attempts, put_on_mirror


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# -- what arrives --------------------------------------------------------------------------------------------


def test_dcp_brings_the_directory_and_a_meta_and_nothing_else(place: Place) -> None:
    meta = place.save(ranks=2)
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    assert (staged.path, staged.step, staged.kind) == (place.dest / "dcp_000200", 200, "dcp")
    assert names_in(place.dest) == ["dcp_000200", "meta_000200.json"]
    (there,) = whole_saves(place.dest).values()
    assert (there.save_id, there.kinds, there.staged_from) == (meta.save_id, ("dcp",), place.mirror.url)
    original = bytes_of(place.root, meta)
    assert bytes_of(place.dest, there) == {path: data for path, data in original.items() if path.startswith("dcp")}


def test_model_brings_one_file_and_full_brings_the_rest(place: Place) -> None:
    place.save(ranks=2)
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    assert staged.path == place.dest / "model_000200.pt"
    assert names_in(place.dest) == ["meta_000200.json", "model_000200.pt"]
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model", full=True)
    assert names_in(place.dest) == [
        "extra_000200_rank0.pt",
        "extra_000200_rank1.pt",
        "meta_000200.json",
        "model_000200.pt",
        "optim_000200_rank0.pt",
        "optim_000200_rank1.pt",
        "tensors_000200_rank0.json",
        "tensors_000200_rank1.json",
    ]
    whole_saves(place.dest)


def test_without_a_kind_dcp_comes_before_model_and_the_answer_says_which(place: Place) -> None:
    place.save(100, ("model",), 1)
    place.save(200, ("dcp", "model"), 2)
    assert stage_checkpoint_step(place.mirror, step=100, dest=place.dest).kind == "model"
    assert stage_checkpoint_step(place.mirror, step=200, dest=place.dest).kind == "dcp"


def test_latest_is_the_newest_step_of_the_lineage_that_has_the_kind(place: Place) -> None:
    first = place.save(100, ("dcp", "model"), 1)
    place.save(300, ("dcp", "model"), 2)
    rewound = make_attempt(1, first)
    place.save(150, ("dcp",), 1, attempt=rewound)
    put_attempts(place.spy, [FIRST_ATTEMPT, rewound])  # type: ignore[arg-type]
    assert stage_checkpoint_step(place.mirror, step="latest", dest=place.dest).step == 150
    assert stage_checkpoint_step(place.mirror, step="latest", dest=place.dest, require_kind="model").step == 100


def test_a_superseded_step_is_staged_only_when_asked_for(place: Place) -> None:
    first = place.save(100, number=1)
    place.save(300, number=2)
    put_attempts(place.spy, [FIRST_ATTEMPT, replace(make_attempt(1, first), by_person=True)])  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound, match="superseded"):
        stage_checkpoint_step(place.mirror, step=300, dest=place.dest)
    assert stage_checkpoint_step(place.mirror, step=300, dest=place.dest, superseded=True).step == 300


def test_an_explicit_kind_is_never_replaced_by_another(place: Place) -> None:
    place.save(200, ("model",))
    with pytest.raises(KindMismatch, match="it has model") as raised:
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    assert raised.value.exit_code == 4
    assert not place.dest.exists()


def test_a_missing_step_lists_the_nearest_ones(place: Place) -> None:
    for number, step in enumerate((100, 200, 300), start=1):
        place.save(step, ("model",), number)
    with pytest.raises(CheckpointNotFound, match="nearest are 100, 200, 300") as raised:
        stage_checkpoint_step(place.mirror, step=220, dest=place.dest)
    assert raised.value.exit_code == 3
    with pytest.raises(UsageError):
        stage_checkpoint_step(place.mirror, step="newest", dest=place.dest)  # type: ignore[arg-type]


def test_a_save_whose_meta_is_not_there_yet_is_not_staged_until_it_is(place: Place) -> None:
    meta = make_save(place.root, 200)
    put_on_mirror(place.spy, place.root, meta, commit=False)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    asked = threading.Event()
    real = place.spy._store.list

    class Committing(SpyStore):
        def list(self, prefix: str = "") -> Iterator[object]:
            if asked.is_set():
                data = meta_to_bytes(meta)
                if self._store.stat("meta_000200.json") is None:
                    self._store.write("meta_000200.json", data, if_generation=0)
            asked.set()
            return real(prefix)

    mirror = Mirror(place.url, True, Committing(place.spy._store))  # type: ignore[arg-type]
    assert stage_checkpoint_step(mirror, step=200, dest=place.dest, wait_s=30).step == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_what_another_user_planted_under_a_temporary_name_is_not_published(place: Place, kind: Kind) -> None:
    """Its bytes are right, so nothing would be fetched; and its owner could change them afterwards."""
    meta = place.save(200, ("dcp", "model"))
    place.dest.mkdir()
    place.dest.chmod(0o1777)
    artifacts = [artifact for artifact in meta.artifacts if artifact.path.startswith(kind)]
    for artifact in artifacts:
        top, slash, below = artifact.path.partition("/")
        planted = place.dest / (tmp_name(top, meta.save_id) + slash + below)
        planted.parent.mkdir(exist_ok=True)
        shutil.copyfile(place.root / artifact.path, planted)
        os.chown(planted, 65534, 65534)
        if slash:
            os.chown(planted.parent, 65534, 65534)
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind=kind)
    published = [staged.path, *staged.path.rglob("*")]
    assert {path.stat().st_uid for path in published} == {os.geteuid()}
    whole_saves(place.dest)


def test_files_larger_than_a_block_and_empty_files_arrive(place: Place) -> None:
    sizes = {"__0_0.distcp": 21 * MIB + 17, "__1_0.distcp": 8 * MIB, ".metadata": 0}
    meta = place.save(200, ("dcp",), sizes=sizes, ranks=2)
    seen: list[StageProgress] = []
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, on_progress=seen.append)
    (there,) = whole_saves(place.dest).values()
    assert {a.path: a.digest for a in there.artifacts} == {
        a.path: a.digest for a in meta.artifacts if a.path.startswith("dcp")
    }
    assert seen[-1] == StageProgress(200, sum(sizes.values()), 0, sum(sizes.values()))
    assert max(length for _, _, length in place.spy.downloads) <= blocks.RANGE_BYTES


def test_many_small_files_are_fetched_in_parallel(place: Place) -> None:
    place.save(200, ("dcp",), ranks=20)
    barrier = threading.Barrier(blocks.WORKERS)
    first = iter(range(blocks.WORKERS))

    def meet(name: str, offset: int) -> None:
        if next(first, None) is not None:
            barrier.wait(30)

    place.spy.before = meet
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    whole_saves(place.dest)


def test_objects_under_other_names_on_the_mirror_arrive_under_the_metas_paths(place: Place) -> None:
    place.save(200, ("model",), 1)
    second = make_save(place.root / "second", 200, ("dcp", "model"), number=2)
    on_mirror = put_on_mirror(place.spy, place.root / "second", second)  # type: ignore[arg-type]
    assert any(artifact.object is not None for artifact in on_mirror.artifacts)
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    assert staged.path == place.dest / "model_000200.pt"
    assert staged.path.read_bytes() == (place.root / "second" / "model_000200.pt").read_bytes()


# -- what is there already -----------------------------------------------------------------------------------


def test_a_staged_step_is_returned_at_once_without_a_download(place: Place) -> None:
    place.save()
    first = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    place.spy.downloads.clear()
    assert stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp") == first
    assert stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", refresh=True) == first
    assert place.spy.downloads == []


def test_a_staged_step_is_returned_without_being_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.save()
    first = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")

    def read(path: Path, _digest: object) -> None:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(destination, "verify_file", read)
    assert stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp") == first
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")


def test_another_kind_of_a_staged_save_joins_its_meta(place: Place) -> None:
    meta = place.save()
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    place.spy.downloads.clear()
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    assert {name for name, _, _ in place.spy.downloads} == {"model_000200.pt"}
    assert names_in(place.dest) == ["dcp_000200", "meta_000200.json", "model_000200.pt"]
    assert whole_saves(place.dest)[meta.save_id].kinds == meta.kinds
    assert read_inventory(place.dest).trash == ()


def test_the_trainers_own_copy_is_used_as_it_is(place: Place) -> None:
    meta = place.save()
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.root, require_kind="model")
    assert staged.path == place.root / "model_000200.pt"
    assert place.spy.downloads == []
    assert whole_saves(place.root)[meta.save_id].staged_from is None


def test_a_truncated_staged_file_is_fetched_again_even_without_refresh(place: Place) -> None:
    meta = place.save(ranks=2)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    (place.dest / "dcp_000200" / "__1_0.distcp").write_bytes(b"short")
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    assert list(whole_saves(place.dest)) == [meta.save_id]
    assert names_in(place.dest) == ["dcp_000200", "meta_000200.json"]


def test_a_bit_flipped_staged_file_is_replaced_on_refresh(place: Place) -> None:
    meta = place.save()
    for kind in ("dcp", "model"):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind=kind)  # type: ignore[arg-type]
    flip_bit(place.dest / "model_000200.pt")
    # Of any kind: the model file is replaced although dcp is what was asked for.
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", refresh=True)
    assert whole_saves(place.dest)[meta.save_id].kinds == meta.kinds
    assert names_in(place.dest) == ["dcp_000200", "meta_000200.json", "model_000200.pt"]


def test_without_refresh_a_stale_copy_stays_and_the_new_one_lies_beside_it(place: Place) -> None:
    old = place.save(200, ("model",), 1)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    new = place.save(200, ("model",), 2)
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert staged.path == place.dest / f"model_000200-{new.save_id[:8]}.pt"
    assert set(whole_saves(place.dest)) == {old.save_id, new.save_id}
    assert stage_checkpoint_step(place.mirror, step=200, dest=place.dest) == staged


def test_stage_checkpoint_step_refresh_replaces_stale_local_model_with_remote_dcp(place: Place) -> None:
    old = place.save(200, ("model",), 1)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    new = place.save(200, ("dcp", "model"), 2)
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", refresh=True)
    assert list(whole_saves(place.dest)) == [new.save_id]
    assert old.save_id != new.save_id
    assert names_in(place.dest) == [f"dcp_000200-{new.save_id[:8]}", f"meta_000200-{new.save_id[:8]}.json"]
    assert staged.kind == "dcp"
    assert find_local_checkpoint_steps(place.dest, "model") == []


def test_refresh_keeps_a_staged_kind_that_another_current_save_holds(place: Place) -> None:
    model = place.save(200, ("model",), 1)
    dcp = place.save(200, ("dcp",), 2)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    flip_bit(place.dest / "model_000200.pt")
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", refresh=True)
    assert set(whole_saves(place.dest)) == {model.save_id, dcp.save_id}


def test_refresh_in_a_training_root_never_touches_what_the_mirror_does_not_hold(place: Place) -> None:
    local_only = make_save(place.root, 200, ("model",), number=5)
    put_attempts(place.root, [FIRST_ATTEMPT])
    other = make_save(place.root.parent / "other", 200, ("dcp",), number=2)
    put_on_mirror(place.spy, place.root.parent / "other", other)  # type: ignore[arg-type]
    before = names_in(place.root)
    with pytest.raises(RefusedOnlyCopy) as raised:
        stage_checkpoint_step(place.mirror, step=200, dest=place.root, refresh=True)
    assert raised.value.exit_code == 7
    assert names_in(place.root) == before
    assert list(whole_saves(place.root)) == [local_only.save_id]


def test_refresh_in_a_training_root_mends_a_rotten_save_under_its_own_names(place: Place) -> None:
    meta = place.save()
    put_attempts(place.root, [FIRST_ATTEMPT])
    flip_bit(place.root / "dcp_000200" / "__0_0.distcp")
    before = names_in(place.root)
    own_meta = (place.root / "meta_000200.json").read_bytes()
    stage_checkpoint_step(place.mirror, step=200, dest=place.root, require_kind="dcp", refresh=True)
    assert list(whole_saves(place.root)) == [meta.save_id]
    assert names_in(place.root) == before
    assert (place.root / "meta_000200.json").read_bytes() == own_meta


def test_a_training_root_whose_trainer_lives_is_not_staged_into(place: Place) -> None:
    place.save()
    put_attempts(place.dest, [FIRST_ATTEMPT])
    lock = RootLock(place.dest)
    lock.acquire({})
    try:
        with pytest.raises(RootLocked):
            stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    finally:
        lock.release()
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)


def test_another_stage_in_a_training_root_is_waited_for_within_a_limit(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.save()
    put_attempts(place.dest, [FIRST_ATTEMPT])
    lock = RootLock(place.dest)
    lock.acquire({"verb": "stage"})
    monkeypatch.setattr(stage, "_OTHER_STAGE_WAIT_S", 0.2)
    with pytest.raises(RootLocked, match="verb stage"):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    monkeypatch.undo()
    told, release = logging.getLogger("ckptmirror.stage"), lambda _: lock.release() is None
    told.addFilter(release)  # at the line that says for whom it waits
    try:
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    finally:
        told.removeFilter(release)


def test_a_strangers_file_inside_a_staged_directory_survives_every_refresh(place: Place) -> None:
    place.save(200, ("dcp",), 1)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    notes = place.dest / "dcp_000200" / "notes.txt"
    notes.write_text("precious")
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, refresh=True)  # it does no harm
    flip_bit(place.dest / "dcp_000200" / ".metadata")
    with pytest.raises(DestinationOccupied, match=r"notes\.txt"):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, refresh=True)
    second = place.save(200, ("dcp",), 2)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, refresh=True)
    assert list(whole_saves(place.dest)) == [second.save_id]
    assert list((place.dest / "dcp_000200").iterdir()) == [notes]


def test_a_node_that_holds_its_part_of_a_save_fetches_only_the_other_nodes_files(place: Place) -> None:
    save_id = "3c" * 16
    nodes = [place.root / "node0", place.root / "node1"]
    parts = [make_save(node, 200, ("dcp",), ranks=2, save_id=save_id, sidecars=False) for node in nodes]
    mine, others = (
        replace(part, nodes=2, node=node, artifacts=tuple(a for a in part.artifacts if f"__{1 - node}_" not in a.path))
        for node, part in enumerate(parts)
    )
    merged = merge_parts([mine, others])
    put_on_mirror(place.spy, nodes[0], merged)  # type: ignore[arg-type]
    (nodes[0] / "meta_000200.json").write_bytes(meta_to_bytes(mine))
    (nodes[0] / "dcp_000200" / "__1_0.distcp").unlink()
    staged = stage_checkpoint_step(place.mirror, step=200, dest=nodes[0], full=True)
    assert staged.path == nodes[0] / "dcp_000200"
    there = whole_saves(nodes[0])[save_id]
    assert {a.path for a in there.artifacts} == {a.path for a in merged.artifacts}


def test_of_two_metas_of_one_save_one_goes(place: Place) -> None:
    meta = place.save(200, ("model",))
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    twin = make_save(place.dest, 200, ("model",), save_id=meta.save_id, tag=meta.save_id[:8])
    assert twin.save_id == meta.save_id
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert list(whole_saves(place.dest)) == [meta.save_id]
    assert len(list(place.dest.glob("model_*"))) == len(list(place.dest.glob("meta_*"))) == 1
