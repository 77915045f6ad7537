"""What the nodes of a job ask a mirror for when they start: by the log of the strict server, request by request."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptmirror.flow.start import gather, resume
from ckptmirror.flow.start.leader import Node
from ckptmirror.testing import Fault, GcsServerProcess
from ckptmirror.testing.fixtures import GCS_BUCKET, gcs_server
from tests.nodes.jobs import Found, Job, expect, take_part

__all__ = ["gcs_server"]
pytestmark = pytest.mark.long

Requests = list[dict[str, Any]]
NODES = ("a", "ab", "abcd")
CHOICE = {  # two saves are on the mirror; it is asked to choose, before the claim and after it
    "object.list all": 3,
    "object.get meta": 2,
    "object.media meta": 2,
    "object.get writer": 4,
    "object.media writer": 4,
    "upload.multipart writer": 1,
}
HIDDEN = 16 * 1024
SHARD_BYTES = 3 * 4 * HIDDEN * (8 + 1 + 5) / 4  # of four nodes
AFTER_CLAIM = 3  # each node asks the mirror whether it has what its table says, and whether the attempt is the newest


def job_on(base: Path, nodes: str, steps: tuple[int, ...] = (), **more: Any) -> Job:
    return Job(base / f"of-{len(nodes)}", nodes, steps, bucket=f"gs://{GCS_BUCKET}/of-{len(nodes)}", **more)


def saved(base: Path, nodes: str, **more: Any) -> Found:
    """Let nodes save two steps, and return what rank 0 ended with."""
    first, *_ = job_on(base, nodes, (1, 2), **more).run()
    assert first.failed == ""
    return first


def part_counted(rank: int, job: Job) -> tuple[Found, Requests]:
    """Take part; return also what all nodes had asked for when they had claimed the run.

    No node goes on before all have looked: the first to start its threads asks the mirror more at once.
    """
    logged: Requests = []
    start = Node.start

    def noted(node: Node, *rest: Any) -> None:
        with urllib.request.urlopen(f"{os.environ['STORAGE_EMULATOR_HOST']}/_log") as answer:
            logged.extend(json.load(answer))
        dist.barrier()
        start(node, *rest)

    Node.start = noted  # type: ignore[method-assign]
    return take_part(rank, job), logged


def counted(job: Job) -> tuple[list[Found], Requests]:
    found, logged = zip(*job.run(part_counted), strict=True)
    return list(found), logged[0]


def sort_of(request: dict[str, Any]) -> str:
    """What a request is for; requests of the same sort differ in their object only."""
    name = (request["object"] or "").partition("/")[2]
    if request["operation"] == "object.list":
        name = request["query"].get("prefix", "").partition("/")[2]
    sort = re.match(r"writer|meta|dcp|model|optim|extra|tensors|parts", name)
    return f"{request['operation']} {sort[0] if sort else 'all' if not name else 'other'}"


def media_of(requests: Requests) -> Counter[str]:
    """How often each file of a save was downloaded, by its name."""
    names = [request["object"].partition("/")[2] for request in requests if request["operation"] == "object.media"]
    return Counter(name for name in names if not name.startswith(("writer", "meta", "parts")))


def test_for_the_choice_all_nodes_together_ask_as_much_as_one_alone(
    gcs_server: GcsServerProcess, tmp_path: Path
) -> None:
    for nodes in NODES:
        first = saved(tmp_path, nodes, hidden=HIDDEN)
        gcs_server.clear_log()
        found, requests = counted(job_on(tmp_path, nodes, hidden=HIDDEN))
        expect(found, 2, "disk", first)
        asked = Counter(map(sort_of, requests))
        files = {sort: asked.pop(sort) for sort in list(asked) if sort.endswith(" dcp")}
        assert asked == CHOICE
        others = len(nodes) - 1  # what is small and alike everywhere, the first rank has written
        assert files == ({"object.list dcp": 1, "object.media dcp": others} if others else {})
        sizes = [request["response_bytes"] for request in requests if sort_of(request) == "object.media dcp"]
        assert sum(sizes) <= others * SHARD_BYTES / 10
        later = Counter(map(sort_of, gcs_server.log()[len(requests) :]))
        assert set(later) <= {"object.list all", "object.get writer", "object.media writer"}
        assert all(times <= AFTER_CLAIM * len(nodes) for times in later.values()), later


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(("wrapped", "kinds"), [("ddp", ("dcp",)), ("fsdp", ("dcp",)), ("ddp", ("model",))])
def test_a_byte_leaves_the_bucket_once_per_node_or_once_for_all(
    wrapped: str, kinds: tuple[Any, ...], shares: bool, gcs_server: GcsServerProcess, tmp_path: Path
) -> None:
    first = saved(tmp_path, "abc", wrapped=wrapped, kinds=kinds)
    for node in "abc":
        shutil.rmtree(tmp_path / "of-3" / node)
    gcs_server.clear_log()
    job = job_on(tmp_path, "abc", wrapped=wrapped, kinds=kinds, shares=shares)
    found, requests = counted(job)
    expect(found, 2, job.url, first)
    assert [one.extra for one in found] == [{"seen": (rank, 2)} for rank in range(3)]
    needed = {
        "ddp": {"__0_small0.distcp": 3},
        "fsdp": {"__0_small0.distcp": 3, "__0_0.distcp": 1, "__1_0.distcp": 1, "__2_0.distcp": 1},
    }[wrapped]
    expected = {".metadata": 3, **needed} if kinds == ("dcp",) else {"model_000002.pt": 3, "optim_000002_rank0.pt": 3}
    expected |= {name: 1 for n in range(3) for name in (f"extra_000002_rank{n}.pt", f"tensors_000002_rank{n}.json")}
    if shares:
        expected = dict.fromkeys(expected, 1)
    assert {name.rpartition("/")[2]: times for name, times in media_of(requests).items()} == expected


def damaged_on_the_way(rank: int, job: Job) -> Found:
    """Take part; what node 2 gets first from another node arrives with one byte changed."""
    relay = gather.relay

    def changed(channel: Any, view: gather.View, plan: Any, sizes: Any) -> gather.Gathered:
        result = relay(channel, view, plan, sizes)
        path = view.path / "dcp_000002/__0_small0.distcp"
        if rank == 2 and path.exists():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        return result

    resume.relay = changed
    return take_part(rank, job)


def test_a_byte_that_changed_between_two_nodes_costs_a_download_and_not_the_save(
    gcs_server: GcsServerProcess, tmp_path: Path
) -> None:
    first = saved(tmp_path, "abc", wrapped="ddp", kinds=("dcp",))
    for node in "abc":
        shutil.rmtree(tmp_path / "of-3" / node)
    gcs_server.clear_log()
    job = job_on(tmp_path, "abc", wrapped="ddp", kinds=("dcp",), shares=True)
    expect(job.run(damaged_on_the_way), 2, "anywhere", first)
    media = {name.rpartition("/")[2]: times for name, times in media_of(gcs_server.log()).items()}
    assert media["__0_small0.distcp"] == 1 + 3  # first for all, then for each node


def test_where_the_mirror_fails_the_node_that_fetches_all_fall_back_alike(
    gcs_server: GcsServerProcess, tmp_path: Path
) -> None:
    saved(tmp_path, "abc", wrapped="ddp", kinds=("dcp",))
    for node in "abc":
        shutil.rmtree(tmp_path / "of-3" / node)
    gcs_server.faults([Fault("object.media", object="dcp_000002/__0_small0", corrupt_byte_at=100, times=0)])
    found = job_on(tmp_path, "abc", wrapped="ddp", kinds=("dcp",), shares=True).run()
    assert [one.step for one in found] == [1, 1, 1]
    assert len({one.passed_over for one in found}) == 1
    assert "__0_small0.distcp is damaged" in found[0].passed_over


def dies_in_its_download(rank: int, job: Job) -> Found:
    fetch = gather.View.fetch

    def dies(view: gather.View, mirror: Any, meta: Any, paths: Any, *rest: Any, **given: Any) -> gather.Gathered:
        if "dcp_000002/__0_small0.distcp" in paths:
            os.kill(os.getpid(), signal.SIGKILL)
        return fetch(view, mirror, meta, paths, *rest, **given)

    gather.View.fetch = dies  # type: ignore[method-assign]
    return take_part(rank, job)


def test_a_node_that_dies_in_its_download_ends_the_start_of_all_and_the_next_goes_on(
    gcs_server: GcsServerProcess, tmp_path: Path
) -> None:
    first = saved(tmp_path, "abc", wrapped="ddp", kinds=("dcp",))
    for node in "abc":
        shutil.rmtree(tmp_path / "of-3" / node)
    job = job_on(tmp_path, "abc", wrapped="ddp", kinds=("dcp",), shares=True)
    _, *others = job.run(dies_in_its_download, dead=(0,))
    assert all("rank 0 on node 0 is gone" in one.failed for one in others)
    expect(job.run(), 2, job.url, first)
