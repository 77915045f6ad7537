"""A save that some nodes have uploaded and others not: status, ls and verify name the nodes and the bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.cli._human_text import size
from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes, meta_to_bytes
from ckptmirror.core.errors import AttemptFenced
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Meta
from ckptmirror.core.uncommitted import is_behind_text
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.upload.workers import upload_save
from ckptmirror.local.table_place import open_known_table
from tests.kit.cli import run
from tests.kit.faults import flip_bit
from tests.kit.roots import MirroredRoot
from tests.kit.saves import make_save

STEP = 200


@dataclass
class Nodes:
    """Two nodes with a part each of one save, and their mirror; nothing of it is uploaded."""

    url: str
    places: list[MirroredRoot]
    parts: list[Meta]

    @property
    def files(self) -> list[str]:
        """What each node saved, as people read it."""
        return [f"{len(part.artifacts)} files ({size(part.size_bytes)})" for part in self.parts]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    url = f"file://{tmp_path}/mirror"
    places = [MirroredRoot(tmp_path / name, [url]) for name in "ab"]
    whole = make_save(places[0].root, STEP, ("model",), ranks=2, number=2, write_meta=False)
    parts = []
    for node, place in enumerate(places):
        mine = tuple(artifact for artifact in whole.artifacts if artifact.rank == node)
        parts.append(replace(whole, nodes=2, node=node, artifacts=mine))
        for artifact in mine if node else ():
            shutil.move(places[0].root / artifact.path, place.root / artifact.path)
        commit(place, parts[-1])
    yield Nodes(url, places, parts)
    for place in places:
        place.close()


def commit(place: MirroredRoot, part: Meta) -> None:
    (place.root / names.SaveName(STEP).meta).write_bytes(meta_to_bytes(part))
    place.add(part)
    place.table.release_save(part.save_id)


def waiting(place: MirroredRoot, url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("status", place.root, "--mirror", url, "--json").stdout)["waiting"]
    return found


def test_the_node_that_is_done_and_the_mirror_name_the_node_that_is_not(nodes: Nodes) -> None:
    done, late = nodes.places
    done.upload(limit=30)
    said = run("status", done.root).stdout
    assert "node 1 of 2 (from 0) has still to upload what it saved" in said
    assert "waiting:" not in said
    (line,) = [one for one in run("status", done.root, "--mirror", nodes.url).stdout.splitlines() if "waiting:" in one]
    assert f"step 200 (save {nodes.parts[0].save_id[:8]}) is not committed on {nodes.url}" in line
    assert (
        f"it waits for node 1. There so far: node 0 with {nodes.files[0]}; how much is lacking, `ckptmirror status"
        in line
    )
    unsent = [record for record in late.records() if record.state.value != "verified"]
    (line,) = [one for one in run("status", late.root, "--mirror", nodes.url).stdout.splitlines() if "waiting:" in one]
    assert f"this is node 1, and {len(unsent)} files (" in line
    assert f"`ckptmirror drain --root {late.root}` sends them" in line
    (listed,) = run("ls", nodes.url).stdout.splitlines()
    assert listed.split()[:4] == ["200", "-", *size(nodes.parts[0].size_bytes).split()]
    assert "it waits for node 1" in listed
    missing = run("verify", nodes.url)
    assert missing.returncode == 3
    assert "2 nodes have saved a part, and it waits for node 1" in missing.stderr


def test_verify_of_a_mirror_with_other_saves_says_what_waits_and_calls_it_no_damage(nodes: Nodes) -> None:
    done, late = nodes.places
    done.commit(100)
    done.upload(limit=30)
    late.upload(limit=2)
    for more in ([], ["--step", "200"]):
        said = run("verify", nodes.url, *more)
        assert said.returncode == (3 if more else 0)
    said = run("verify", nodes.url)
    (note,) = said.stderr.splitlines()[:1]
    assert f"it waits for node 1. There so far: node 0 with {nodes.files[0]}, 2 files (" in note
    assert "of nodes that are not done" in note
    assert "no valid meta" not in said.stderr
    facts = json.loads(run("verify", "--root", done.root, "--mirror", nodes.url, "--json").stdout)
    assert facts["outcome"] == "whole"
    (one,) = facts["waiting"]
    mine = nodes.parts[0]
    assert one["parts"] == [
        {"node": 0, "files": len(mine.artifacts), "size_bytes": mine.size_bytes, "missing_files": 0, "missing_bytes": 0}
    ]
    assert (one["mirror"], one["step"], one["save_id"]) == (nodes.url, STEP, mine.save_id)
    assert (one["nodes"], one["absent"], one["other_files"]) == (2, [1], 2)


def test_a_file_of_a_part_that_is_gone_from_the_mirror_is_missing_bytes(nodes: Nodes) -> None:
    done, _ = nodes.places
    done.upload(limit=30)
    (gone,) = [artifact for artifact in nodes.parts[0].artifacts if artifact.path.startswith("model")]
    (Path(nodes.url.removeprefix("file://")) / gone.path).unlink()
    (one,) = waiting(done, nodes.url)
    (share,) = one["parts"]
    assert (share["missing_files"], share["missing_bytes"]) == (1, gone.digest.size_bytes)
    said = run("status", done.root, "--mirror", nodes.url).stdout
    assert f", of which 1 file ({size(gone.digest.size_bytes)}) disappeared" in said


def test_a_save_that_all_have_uploaded_waits_for_nobody(nodes: Nodes) -> None:
    for place in nodes.places:
        place.upload(limit=30)
    for place in nodes.places:
        place.upload(limit=30)
        assert waiting(place, nodes.url) == []
        assert "safe" in run("status", place.root, "--mirror", nodes.url).stdout
    assert run("verify", nodes.url).returncode == 0


def test_a_mirror_that_is_not_there_is_an_error_that_names_it(nodes: Nodes, tmp_path: Path) -> None:
    ended = run("status", nodes.places[0].root, "--mirror", f"file://{tmp_path}/elsewhere/run", "--json")
    assert (ended.returncode, ended.stdout) == (10, "")
    assert f"{tmp_path}/elsewhere" in ended.stderr


def test_a_node_that_waits_for_another_learns_that_its_attempt_is_fenced(nodes: Nodes) -> None:
    """The other node sends nothing more, and this one waited for ever for its part."""
    done, _ = nodes.places
    fenced = False

    def confirm(_mirror: Mirror, _meta: Meta | None = None, *, is_part: bool = False) -> None:
        if fenced:
            raise AttemptFenced

    context = done.context(confirm=confirm)
    upload_save(context, nodes.parts[0].save_id)
    assert context.awaited[nodes.parts[0].save_id]
    fenced = True
    done.table.end_delays([nodes.url])
    with pytest.raises(AttemptFenced):
        upload_save(context, nodes.parts[0].save_id)


def test_a_node_that_waits_for_another_sends_its_own_part_again_if_the_mirror_loses_it(nodes: Nodes) -> None:
    """The process that had sent it asked for the other's part alone, for as long as it lived."""
    done, _ = nodes.places
    context, save_id = done.context(), nodes.parts[0].save_id
    upload_save(context, save_id)
    (part,) = (Path(nodes.url.removeprefix("file://")) / "parts").iterdir()
    part.unlink()
    for _ in range(2):
        done.table.end_delays([nodes.url])
        upload_save(context, save_id)
    assert part.exists()
    assert context.awaited[save_id]


def test_a_node_that_waits_for_another_makes_its_part_name_what_it_sends_again(nodes: Nodes) -> None:
    """Another process may find that the mirror damaged a file, and the one that waits may be who sends it again."""
    done, _ = nodes.places
    context, save_id = done.context(), nodes.parts[0].save_id
    upload_save(context, save_id)
    mirror = Path(nodes.url.removeprefix("file://"))
    (part,) = (mirror / "parts").iterdir()
    first = next(record for record in done.records() if record.role == "artifact")
    (mirror / first.path).write_bytes(b"damaged")
    done.table.unverify(save_id, first.path, nodes.url, "it is damaged")
    done.table.end_delays([nodes.url])
    upload_save(context, save_id)
    (again,) = [record for record in done.records() if record.path == first.path]
    named = {one.path: one.object for one in meta_from_bytes(part.read_bytes()).artifacts}
    assert again.object != first.path
    assert named[first.path] == again.object
    assert context.awaited[save_id]


@pytest.mark.long
def test_who_waited_long_for_a_node_asks_often_again_once_somebody_waits_for_it(nodes: Nodes) -> None:
    """The delay went on growing in the next job, whose close gave up although the part had come in its first second."""
    done, _ = nodes.places
    for _ in range(8):
        done.clock.pass_s(120)
        done.upload()
    (waits,) = [record for record in done.records() if record.role == "meta"]
    assert waits.attempts_made >= 8
    assert done.table.end_delays([nodes.url], lambda error: error == "another reason") == 0
    assert done.table.end_delays([nodes.url], is_behind_text) == 1
    (waits,) = [record for record in done.records() if record.role == "meta"]
    assert (waits.attempts_made, waits.not_before_ms) == (1, None)


def test_a_push_asks_at_once_for_what_an_earlier_one_waited_for(nodes: Nodes, tmp_path: Path) -> None:
    done, late = nodes.places
    other = f"file://{tmp_path}/other"
    assert run("push", "--root", done.root, "--mirror", other, "--timeout", "6").returncode == 8
    assert run("push", "--root", late.root, "--mirror", other).returncode == 0
    with open_known_table(done.root) as table:  # which has the clock of the machine
        table.end_delays([other])
        claim = table.claim("worker", other, lease_s=60)
        assert claim is not None
        table.put_back(claim, "the other node has not sent its part", not_before_s=3600)
    assert run("push", "--root", done.root, "--mirror", other, "--timeout", "100").returncode == 0


@pytest.fixture
def dcp_nodes(tmp_path: Path) -> Iterator[Nodes]:
    """The same of kind dcp, where both nodes have ``.metadata``."""
    url = f"file://{tmp_path}/mirror"
    places = [MirroredRoot(tmp_path / name, [url]) for name in "ab"]
    parts = []
    for node, place in enumerate(places):
        whole = make_save(place.root, STEP, ("dcp",), ranks=2, number=2, write_meta=False, save_id="3c" * 16)
        mine = tuple(artifact for artifact in whole.artifacts if artifact.rank in (None, node))
        parts.append(replace(whole, nodes=2, node=node, artifacts=mine))
        commit(place, parts[-1])
    yield Nodes(url, places, parts)
    for place in places:
        place.close()


@pytest.mark.parametrize("fault", [flip_bit, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_file_of_all_nodes_that_one_cannot_send_is_left_to_another(
    fault: Callable[[Path], object], dcp_nodes: Nodes
) -> None:
    damaged, other = dcp_nodes.places
    path = f"dcp_{STEP:06}/.metadata"
    fault(damaged.root / path)
    damaged.upload(limit=4, patient=False)
    (record,) = [one for one in damaged.records() if one.path == path]
    assert record.state is RecordState.PENDING
    assert str(record.reason).endswith("Another node has this file too, and may send it.")
    other.upload(limit=10)
    damaged.upload()
    other.upload()
    assert {one.state for place in dcp_nodes.places for one in place.records()} == {RecordState.VERIFIED}
    assert run("verify", dcp_nodes.url).returncode == 0


def test_a_file_of_all_nodes_that_none_can_send_fails(dcp_nodes: Nodes) -> None:
    path = f"dcp_{STEP:06}/.metadata"
    for place in dcp_nodes.places:
        flip_bit(place.root / path)
        place.upload()
        (record,) = [one for one in place.records() if one.path == path]
        assert record.state is RecordState.FAILED
        assert str(record.reason).endswith("was saved.")
    place.table.retry_failed()  # as a drain does: it waits no longer than the first
    place.upload(limit=1, patient=False)
    (record,) = [one for one in place.records() if one.path == path]
    assert record.attempts_made == 8
    assert (record.not_before_ms or 0) - place.clock.now_ms() in range(2_000, 4_001)
