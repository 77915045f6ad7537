"""What a save and a start ask of the mirror, and of the ranks, grows at most as the number of nodes does."""

from __future__ import annotations

import functools
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.flow.upload import meta as meta_module
from ckptmirror.ranks.messages import Answer, Report, decide
from tests.kit.cost import calls_of
from tests.scale.channel import RECORDED, Exchange, SmallJob, traffic_of, values_for
from tests.scale.job import Job, Shape
from tests.scale.measure import Measured, measure
from tests.scale.service import Asked

pytestmark = pytest.mark.long

_NODES = (4, 16)
_SMALL = 1 << 20
_MORE = 1.35  # what chance may add: how often a node looks whether another is ready. A square would be 4 times as much


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[Exchange]:
    """The exchanges of a start from the disks and of a save, recorded."""
    job = SmallJob(tmp_path_factory.mktemp("small"))
    job.run(1)
    return job.run(2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, heard: list[Exchange]) -> list[Measured]:
    return [
        measure(Shape(nodes, ranks_per_node=1, shard_bytes=_SMALL), tmp_path_factory.mktemp("job"), heard)
        for nodes in _NODES
    ]


def assert_linear(few: float, many: float) -> None:
    """Check that what ``_NODES[1]`` nodes need is at most so many times what ``_NODES[0]`` need, and a little more."""
    assert many <= few * _NODES[1] / _NODES[0] * _MORE


def test_the_requests_of_a_save_grow_with_the_nodes(measured: list[Measured]) -> None:
    few, many = (one.save for one in measured)
    assert few.refused == many.refused == 0
    assert_linear(few.writes, many.writes)
    assert_linear(few.reads, many.reads)
    assert many.pages <= 3 * _NODES[1]
    assert_linear(few.sent_bytes, many.sent_bytes)
    assert_linear(few.artifact_bytes, many.artifact_bytes)


def test_no_object_is_changed_more_than_once_in_a_save(measured: list[Measured]) -> None:
    assert [one.fastest_change[1] for one in measured] == [1, 1]


def test_the_requests_of_a_start_grow_with_the_nodes(measured: list[Measured]) -> None:
    for few, many in (tuple(getattr(one, name) for one in measured) for name in ("from_disks", "from_mirror")):
        assert_linear(few.asked.writes, many.asked.writes)
        assert_linear(few.asked.reads, many.asked.reads)
        assert_linear(few.asked.pages, many.asked.pages)
        assert_linear(few.leader.received_bytes, many.leader.received_bytes)
        assert_linear(few.brought.reads, many.brought.reads)
        assert_linear(few.brought.artifact_bytes, many.brought.artifact_bytes)


@pytest.mark.short
def test_the_work_of_the_choice_grows_with_the_nodes(tmp_path: Path) -> None:
    calls = []
    for nodes in _NODES:
        base = tmp_path / str(nodes)
        base.mkdir()
        job = Job(Shape(nodes, 1, _SMALL), base)
        job.start(job.open())
        job.save()
        job.close()
        facts = job.open()
        calls.append(calls_of(functools.partial(job.choose, facts)))
        job.close()
    assert_linear(*calls)


def test_what_rank_0_sends_and_receives_in_a_save_grows_with_the_ranks(measured: list[Measured]) -> None:
    few, many = (one.save_traffic for one in measured)
    assert_linear(few.messages, many.messages)
    assert_linear(few.sent_bytes, many.sent_bytes)
    assert_linear(few.received_bytes, many.received_bytes)


def test_an_answer_has_what_its_reader_needs_however_many_ranks_there_are(heard: list[Exchange]) -> None:
    for one in heard:
        if one.what == "find out which node has what":
            continue  # every node works out from it which files it fetches, gets and passes on: see docs/scale.md
        few, many = (traffic_of(one, Shape(nodes), {}).answer_bytes for nodes in (10, 100))
        assert many - few <= 24 * 90, one.what  # at most which ranks lead a node, which is one word for each
    report = next(one for one in heard if one.what == "report the files")
    disks = next(one for one in heard if one.what == "look at the disks")
    assert (report.to, disks.to) == ("node", "first")
    for one in (report, disks):
        few, many = (traffic_of(one, Shape(nodes), {}).answer_bytes for nodes in (10, 100))
        assert many < 1.1 * few


def test_the_small_job_says_what_a_large_one_would(heard: list[Exchange]) -> None:
    """Of a job of the recorded shape, the values are the recorded ones, or as long."""
    for one in heard:
        assert [len(value) for value in values_for(one, RECORDED)][:4] == [len(value) for value in one.values][:4]


def test_who_sends_an_answer_of_all_ranks_to_all_ranks_is_found() -> None:
    """What this page of tests is for: the answers of an exchange whose values all differ grow with the ranks."""
    few, many = (
        len(pickle.dumps(decide([Report(1, "", b"%d" % rank, None) for rank in range(ranks)]))) for ranks in (16, 160)
    )
    assert many > 5 * few
    reports = [Report(1, "", b"%d" % rank, None) for rank in range(160)]
    assert len(pickle.dumps(Answer.with_values(reports, range(8)))) < few


def test_if_the_node_that_came_last_takes_too_long_not_all_read_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes look again before the one that came last has written: some stand in for it, but not all of them."""
    nodes = 16
    monkeypatch.setattr(meta_module, "_random", random.Random(1))
    monkeypatch.setattr(meta_module, "_WRITING_S", 0.3)
    monkeypatch.setattr(meta_module, "_WRITING_PART_S", 0.0)
    merges: list[int] = []
    honest = meta_module.MetaUpload._merged

    def counted(self: Any, mine: Any, came_last: bool) -> Any:
        merged = honest(self, mine, came_last)
        merges.append(mine.node)
        return merged

    monkeypatch.setattr(meta_module.MetaUpload, "_merged", counted)
    job = Job(Shape(nodes, 1, _SMALL), tmp_path)
    job.start(job.open())
    save = job.save()
    job.close()
    assert 2 <= len(merges) <= nodes / 2
    assert save.refused == len(merges) - 1


def test_a_restart_on_as_many_ranks_brings_no_extra_state_of_other_nodes(tmp_path: Path) -> None:
    job = Job(Shape(3, 2, _SMALL), tmp_path)
    job.start(job.open())
    job.save()
    job.close()
    started = job.start(job.open())
    brought = job.gather(started.proposal)
    job.close()
    assert brought == Asked()
