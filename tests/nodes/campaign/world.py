"""The world of a history: the disks of nodes, the mirrors, jobs that sleep, and what is true of every save."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptmirror.core.model import Meta
from ckptmirror.testing import Fault, GcsServerProcess
from tests.nodes.campaign.jobs import Job
from tests.nodes.campaign.plans import Plan
from tests.nodes.campaign.rank import Committed, Mirrored, Resumed
from tests.nodes.campaign.trained_values import code_of

__all__ = ["BUCKET", "NODES", "Broken", "FileMirror", "GcsMirror", "Lost", "MirrorPlace", "Mixed", "Truth", "World"]

NODES = "abcd"
BUCKET = "campaign"
_LOCK_FILE = ".ckptmirror.lock"


class Broken(AssertionError):
    """Something that must always hold does not."""


class Lost(Broken):
    """What was acknowledged is gone."""


class Mixed(Broken):
    """What was loaded, staged or kept is not what was saved."""


Object = tuple[str, bytes]
"""Its generation, and its bytes."""


class MirrorPlace:
    """A mirror, with a way to silence it and a way to look behind the silence."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_silent = False

    def objects(self) -> dict[str, Object]:
        raise NotImplementedError

    def lose(self, name: str) -> None:
        """Lose an object, as a bucket's lifecycle rule or a person would take it."""
        raise NotImplementedError

    def fall_silent(self) -> None:
        raise NotImplementedError

    def come_back(self) -> None:
        raise NotImplementedError


class FileMirror(MirrorPlace):
    """A directory below what looks like a mount, which may go."""

    def __init__(self, mount: Path) -> None:
        super().__init__(f"file://{mount}/run")
        self._mount, self._away = mount, mount.with_name(f"{mount.name}.away")
        mount.mkdir()

    @property
    def _root(self) -> Path:
        return (self._away if self.is_silent else self._mount) / "run"

    def objects(self) -> dict[str, Object]:
        root, found = self._root, {}
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.suffix != ".tmp" and path.name != _LOCK_FILE:
                status = path.stat()
                generation = f"{status.st_ino}-{status.st_mtime_ns}"
                found[str(path.relative_to(root))] = (generation, path.read_bytes())
        return found

    def lose(self, name: str) -> None:
        (self._root / name).unlink()

    def fall_silent(self) -> None:
        if not self.is_silent:
            self._mount.rename(self._away)
            self.is_silent = True

    def come_back(self) -> None:
        if self.is_silent:
            if self._mount.exists():
                raise Broken(f"something was written below {self._mount}, which was not mounted")
            self._away.rename(self._mount)
            self.is_silent = False


class GcsMirror(MirrorPlace):
    """A prefix of a bucket of the strict server."""

    def __init__(self, server: GcsServerProcess, prefix: str) -> None:
        super().__init__(f"gs://{BUCKET}/{prefix}")
        self._server, self._prefix = server, prefix
        self._read: dict[tuple[str, str], bytes] = {}

    def objects(self) -> dict[str, Object]:
        self._server.clear_faults()
        found, token = {}, ""
        while True:
            page = self._get(f"prefix={urllib.parse.quote(self._prefix)}/&pageToken={token}")
            for item in page.get("items", []):
                key = (item["name"], item["generation"])
                if key not in self._read:
                    self._read[key] = self._bytes(item["name"])
                found[item["name"].removeprefix(f"{self._prefix}/")] = (item["generation"], self._read[key])
            token = page.get("nextPageToken", "")
            if not token:
                break
        if self.is_silent:
            self.fall_silent()
        return found

    def lose(self, name: str) -> None:
        self._server.clear_faults()
        self._ask(f"o/{urllib.parse.quote(f'{self._prefix}/{name}', safe='')}", method="DELETE")
        if self.is_silent:
            self.fall_silent()

    def _get(self, query: str) -> dict[str, Any]:
        return dict(json.loads(self._ask(f"o?{query}")))

    def _bytes(self, name: str) -> bytes:
        return self._ask(f"o/{urllib.parse.quote(name, safe='')}?alt=media")

    def _ask(self, path: str, method: str = "GET") -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"{self._server.url}/storage/v1/b/{BUCKET}/{path}", method=method)
        with opener.open(request, timeout=60) as answer:
            return bytes(answer.read())

    def fall_silent(self) -> None:
        self._server.faults([Fault(status=503, times=0)])
        self.is_silent = True

    def come_back(self) -> None:
        self._server.clear_faults()
        self.is_silent = False

    def suffer(self, faults: list[Fault]) -> None:
        if not self.is_silent:
            self._server.faults(faults)

    def recover(self) -> None:
        if not self.is_silent:
            self._server.clear_faults()


@dataclass
class Truth:
    """A save, as its job made it.

    Attributes:
        disks: The nodes that wrote it, each with the number of the disk that it had by then.
        acknowledged: A rank was told that it is committed.
        mirrored: A rank was told that it is on all mirrors.
    """

    save_id: str
    job: int
    step: int
    disks: dict[str, int]
    acknowledged: bool = False
    mirrored: bool = False

    @property
    def code(self) -> int:
        return code_of(self.job, self.step)


@dataclass
class World:
    """Everything that outlives a job.

    Attributes:
        disk: The number of each node's disk: one more whenever it is lost, or restored from a copy.
        jobs: Every job that was begun.
        asleep: Those of which nodes are stopped.
        truths: Every save that anybody has heard of, by its id.
        job_of_attempt: The job that claimed an attempt, by the attempt's id.
        lost: The objects that a mirror lost, by url and name.
        hurt: The saves that one lost an object of, by url and id: no promise holds for them there any more.
        gone: Those of them of which nobody had another copy when that happened.
        content: The crc32c of every file of every save, by save id and plain path, as it was first seen.
        refused: Whether the last start refused to begin at step 0, so that a person has to decide.
        told: What happened, a line each.
    """

    base: Path
    mirrors: list[MirrorPlace]
    disk: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NODES, 0))
    jobs: list[Job] = field(default_factory=list)
    asleep: list[Job] = field(default_factory=list)
    truths: dict[str, Truth] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    disks_of_job: dict[int, dict[str, int]] = field(default_factory=dict)
    job_of_attempt: dict[str, int] = field(default_factory=dict)
    lost: set[tuple[str, str]] = field(default_factory=set)
    hurt: set[tuple[str, str]] = field(default_factory=set)
    gone: set[tuple[str, str]] = field(default_factory=set)
    content: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: bool = False
    told: list[str] = field(default_factory=list)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(mirror.url for mirror in self.mirrors)

    @property
    def silent(self) -> list[MirrorPlace]:
        return [mirror for mirror in self.mirrors if mirror.is_silent]

    @property
    def busy(self) -> set[str]:
        """The nodes that a sleeping job holds."""
        return {job.plan.nodes[rank] for job in self.asleep for rank in job.plan.ambush.struck}  # type: ignore[union-attr]

    @property
    def free(self) -> list[str]:
        return [node for node in NODES if node not in self.busy]

    def root(self, node: str) -> Path:
        return self.base / node

    @property
    def kept(self) -> Path:
        """The persistent directory; a history without one has no such path."""
        return self.base / "kept"

    def begin(self, plan: Plan) -> Job:
        self.plans[plan.number] = plan
        self.disks_of_job[plan.number] = {node: self.disk[node] for node in plan.nodes}
        self.jobs.append(Job(plan))
        return self.jobs[-1]

    def lose_disk(self, node: str) -> None:
        shutil.rmtree(self.root(node), ignore_errors=True)
        self.disk[node] += 1

    def note(self, job: Job) -> None:
        """Take in what the ranks of a job have said."""
        for found in job.all_said(Resumed):
            self.job_of_attempt[found.attempt] = job.plan.number
        for said in job.said:
            heard: list[Truth] = []
            for one in said:
                if isinstance(one, Committed):
                    truth = self._truth(one.save_id, job.plan.number, one.step)
                    truth.acknowledged = True
                    heard.append(truth)
                if isinstance(one, Mirrored):
                    for truth in heard:
                        truth.mirrored = True

    def truth_of(self, meta: Meta) -> Truth:
        """What is true of a save, of which a meta may be all that is left of its job's words."""
        number = meta.training_config["job"]
        return self._truth(meta.save_id, int(number), meta.step)

    def _truth(self, save_id: str, job: int, step: int) -> Truth:
        truth = self.truths.setdefault(save_id, Truth(save_id, job, step, dict(self.disks_of_job[job])))
        if (truth.job, truth.step) != (job, step):
            raise Mixed(f"save {save_id[:8]} is of step {step} of job {job}, and of step {truth.step} of {truth.job}")
        return truth

    def close(self) -> None:
        for job in self.jobs:
            job.kill()


@contextmanager
def gcs_server(directory: Path) -> Iterator[GcsServerProcess]:
    """The strict server for all histories of a campaign."""
    with GcsServerProcess(directory, buckets=[BUCKET]) as server:
        yield server
