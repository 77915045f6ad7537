"""A mirror with 100,000 objects: what each verb asks of it is bounded by pages and saves, not by objects.

100,000 objects in the full campaign, 20,000 in a test of every day: the bounds are stated in both.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror import list_checkpoints, stage_checkpoint_step
from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.errors import CheckpointNotFound
from ckptmirror.core.events import EventBus
from ckptmirror.core.model import Meta
from ckptmirror.core.retention import Retention
from ckptmirror.core.start.decide import Wish
from ckptmirror.flow.drain import drain, push
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.flow.retention.rotation import rotate_root
from ckptmirror.flow.start.bring import Bringer
from ckptmirror.flow.start.leader import Node
from ckptmirror.stores import memory, open_store
from tests.kit.mirrors import OBJECTS_PER_SAVE, counted, crowd, memory_url
from tests.kit.roots import require
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts

pytestmark = pytest.mark.long

OBJECTS = 100_000 if os.environ.get("CKPTMIRROR_CAMPAIGN") == "full" else 20_000
PAGES, SAVES = math.ceil(OBJECTS / 1000), OBJECTS // OBJECTS_PER_SAVE
URL = "memory://crowded/run"


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Meta]]:
    """A root that holds the newest save of a crowded mirror."""
    root = tmp_path_factory.mktemp("crowded") / "root"
    _, newest = crowd("crowded", root, OBJECTS)
    put_attempts(root, [FIRST_ATTEMPT])
    yield root, newest
    memory.drop("crowded")


def asked(call: Callable[[], object]) -> Counter[str]:
    """What a call asks of the mirror; it says so, with the time and the memory that it took."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with counted() as requests:
        call()
    more_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    print(f"{OBJECTS} objects: {dict(requests)}, {time.monotonic() - started:.1f} s, {more_mib} MiB more")
    assert more_mib < 200
    return requests


def test_a_listing_takes_each_page_and_each_meta_once(crowded: tuple[Path, Meta]) -> None:
    requests = asked(lambda: list_checkpoints(URL))
    assert requests["list"] <= PAGES
    assert requests["read"] <= SAVES + 2
    assert set(requests) == {"list", "read"}


def test_staging_the_latest_asks_no_more_than_a_listing_and_its_own_files(
    crowded: tuple[Path, Meta], tmp_path: Path
) -> None:
    _, newest = crowded
    requests = asked(lambda: stage_checkpoint_step(URL, step="latest", dest=tmp_path))
    assert requests["list"] <= PAGES + 2
    assert requests["read"] <= SAVES + 2
    assert requests["stat"] == 0
    assert requests["download"] <= len(newest.artifacts)


@pytest.mark.parametrize("full", [False, True])
def test_staging_one_step_does_not_care_how_many_others_there_are(
    full: bool, crowded: tuple[Path, Meta], tmp_path: Path
) -> None:
    """A listing for each role of file, not a question for each file."""
    _, newest = crowded
    requests = asked(
        lambda: stage_checkpoint_step(URL, step=newest.step, dest=tmp_path, full=full, require_kind="model")
    )
    assert requests["list"] + requests["read"] + requests["stat"] <= 16
    assert requests["download"] <= len(newest.artifacts)


def test_a_start_reads_a_crowded_mirror_once(crowded: tuple[Path, Meta], tmp_path: Path) -> None:
    node = Node(tmp_path / "fresh", [MirrorSpec(URL)], Retention(), EventBus(), workers_per_mirror=0)

    requests = asked(lambda: Bringer(node, Wish(), EventBus()))
    node.close()
    assert requests["list"] <= PAGES + 2
    assert requests["read"] <= SAVES + 10


def test_a_push_a_drain_and_a_rotation_ask_about_their_own_saves_only(crowded: tuple[Path, Meta]) -> None:
    root, newest = crowded
    others = [make_save(root, newest.step + more, ranks=2, number=newest.step + more) for more in (1, 2)]
    own = sum(len(meta.artifacts) + 1 for meta in (newest, *others))
    requests = asked(lambda: push(root, URL))
    assert requests["list"] <= 2 * PAGES + 20  # what is there already; and before a commit, whether a rival saved
    assert requests["stat"] + requests["upload"] + requests["read"] <= 4 * own
    requests = asked(lambda: drain(root))
    assert requests["list"] <= 2 * PAGES + 20
    assert requests["read"] <= 10
    require(root, URL)
    requests = asked(lambda: rotate_root(root, Retention(keep_last=1)))
    assert requests["list"] + requests["stat"] + requests["read"] <= 2 * own + 20
    assert sorted(path.name for path in root.glob("meta_*")) == [names.SaveName(newest.step + 2).meta]


def test_a_meta_that_names_a_directory_for_each_file_costs_no_request_for_each(tmp_path: Path) -> None:
    """A small bucket held up a stage for hours: each directory of its one meta was listed."""
    url = memory_url()
    store = open_store(url)
    meta = make_save(tmp_path, 100, ("dcp",), sidecars=False)
    (one,) = (artifact for artifact in meta.artifacts if artifact.path.endswith(".distcp"))
    many = tuple(replace(one, path=f"dcp_000100/{number}/__0_0.distcp") for number in range(500))
    put_attempts(store, [FIRST_ATTEMPT])
    store.write(names.SaveName(100).meta, meta_to_bytes(replace(meta, artifacts=many)), if_generation=0)
    with counted() as requests, pytest.raises(CheckpointNotFound):
        stage_checkpoint_step(url, step=100, dest=tmp_path / "staged")
    assert requests["list"] + requests["stat"] < 10
