"""A node that dies at any point of a save: the others hear of it, and the job goes on from a save of all nodes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.stores import open_store
from tests.crash.campaign import FULL
from tests.kit.roots import leftovers
from tests.kit.training import same
from tests.nodes.jobs import Job

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

# By node: as many points as two saves and their upload may pass, and as many as they always do. Either node may write
# the meta of all.
POINTS, SURE = (330, 225), (270, 190)
SLICE = ((45, 180, 270, 310), (3, 45, 90, 180))
CASES = [(node, point) for node in (0, 1) for point in (range(1, POINTS[node]) if FULL else SLICE[node])]


@pytest.mark.parametrize(("dies", "point"), CASES)
def test_a_job_goes_on_after_a_node_died_at_any_point_of_a_save(dies: int, point: int, tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1, 2), "ddp", dies=dies, crash_at=str(point))
    first = job.run()
    failed = first[1 - dies].failed
    reasons = (f"rank {dies} on node {dies} is gone", "not mirrored", "Not everything", "still in flight")
    assert failed == "" or any(reason in failed for reason in reasons)
    second = Job(tmp_path, "ab", (3,), "ddp").run()
    for one in second:
        assert one.failed == ""
        assert one.step in (1, 2)
        assert same(one.began, first[1 - dies].saved[one.step])
    assert len({one.step for one in second}) == 1
    third = Job(tmp_path, "ab", (), "ddp").run()
    assert [(one.step, one.place) for one in third] == [(3, "disk")] * 2
    assert all(same(one.began, second[0].saved[3]) for one in third)
    with contextlib.closing(open_store(job.url)) as store:
        catalog = mirror_catalog(Mirror(job.url, True, store))
    assert {meta.step for meta in catalog.saves.values()} >= {1, 3}
    assert catalog.problems == {}
    for node in "ab":
        assert leftovers(tmp_path / node) == []


@pytest.mark.parametrize("node", [0, 1])
def test_a_save_and_its_upload_pass_as_many_points_as_are_tried(node: int, tmp_path: Path) -> None:
    ended = Job(tmp_path, "ab", (1, 2), "ddp", dies=node, crash_at="0").run()
    assert ended[node].points > SURE[node]
