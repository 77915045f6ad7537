"""What each node of a job gathers for its ranks, where somebody else may write to the root or to the mirror."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core.meta_merging import plain
from ckptmirror.core.model import Kind, Meta
from ckptmirror.core.start.decide import Result
from ckptmirror.core.start.sharing import Transfer
from ckptmirror.flow.start.gather import View, _pieces, relay
from ckptmirror.formats.base import LoadTarget
from ckptmirror.ranks.single import SingleRank
from tests.kit.roots import whole
from tests.kit.saves import digest_of, make_save
from tests.kit.training import new_state, saved_run


class Sent(SingleRank):
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.data = bytearray()

    def send(self, data: memoryview, to: int) -> None:
        assert to == 1
        self.data += data


def view_of(root: Path, meta: Meta, kind: Kind = "dcp") -> View:
    (root / ".ckptmirror").mkdir(exist_ok=True)
    return View(root, plain(meta), kind, (0,), (0,), trusted=True, sends=True)


@pytest.mark.parametrize("has_links", [True, False])
def test_nothing_is_written_through_a_link_that_somebody_put_into_a_view(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(tmp_path / "root", make_save(tmp_path / "root", 100, ("dcp",)))
    metadata = view.path / "dcp_000100/.metadata"
    metadata.parent.mkdir(parents=True)
    metadata.symlink_to(tmp_path / "elsewhere")
    if not has_links:
        monkeypatch.setattr(os, "link", _no_links)
    assert view.begin().lacks == ()
    assert not (tmp_path / "elsewhere").exists()
    assert not metadata.is_symlink()
    assert metadata.read_bytes() == (tmp_path / "root/dcp_000100/.metadata").read_bytes()


def _no_links(_source: Path, target: Path, **_more: object) -> None:
    if target.is_symlink():
        raise FileExistsError
    raise PermissionError


@pytest.mark.parametrize("what", ["directory", "file", "fifo"])
def test_what_is_behind_a_link_or_no_file_is_not_in_a_view(what: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    name = ".metadata" if what == "directory" else "__0_0.distcp"
    meta = make_save(root, 100, ("dcp",), sizes={"__0_0.distcp": 0 if what == "fifo" else len(f"{tmp_path}/other")})
    if what == "directory":
        (root / "dcp_000100").rename(tmp_path / "other")
        (root / "dcp_000100").symlink_to(tmp_path / "other")
    else:
        (root / "dcp_000100" / name).unlink()
        if what == "fifo":
            os.mkfifo(root / "dcp_000100" / name)
        else:
            (root / "dcp_000100" / name).symlink_to(tmp_path / "other")
    view = view_of(root, meta)
    view.need(None)
    assert f"dcp_000100/{name}" in view.begin().lacks
    assert not os.path.lexists(view.path / "dcp_000100" / name)


@pytest.mark.parametrize("what", ["link", "fifo"])
def test_a_link_or_a_pipe_that_is_in_a_view_by_now_is_not_sent(what: str, tmp_path: Path) -> None:
    view = view_of(tmp_path / "root", make_save(tmp_path / "root", 100, ("dcp",)))
    view.begin()
    path = view.path / "dcp_000100/__0_0.distcp"
    path.unlink()
    os.mkfifo(tmp_path / "pipe")
    if what == "fifo":
        (tmp_path / "pipe").rename(path)
    else:
        path.symlink_to(tmp_path / "pipe")
    channel, found = Sent(), []

    def send() -> None:
        found.append(
            relay(
                channel,
                view,
                [Transfer("dcp_000100/__0_0.distcp", 0, (1,))],
                {path.parent.name: 0, "dcp_000100/__0_0.distcp": 3000},
            )
        )

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    sender.join(30.0)
    assert found, "it waits for somebody to write to the pipe"
    assert found[0].result is Result.BROKEN
    assert len(channel.data) == 3000  # as many bytes as the other node waits for


def test_a_file_that_says_that_it_is_huge_takes_no_memory_before_it_is_sent() -> None:
    buffer = memoryview(bytearray(16))
    assert len(next(_pieces(buffer, 2**62))) == 16
    assert [len(piece) for piece in _pieces(buffer, 40)] == [16, 16, 8]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Meta]:
    saved_run(tmp_path / "root", (1,))
    return tmp_path / "root", whole(tmp_path / "root")[1]


def test_metadata_with_another_checksum_does_not_say_what_is_read(saved: tuple[Path, Meta]) -> None:
    root, meta = saved
    more = next(artifact for artifact in meta.artifacts if artifact.path.endswith(".distcp"))
    meta = replace(meta, artifacts=(*meta.artifacts, replace(more, path="dcp_000001/__9_0.distcp")))
    view = view_of(root, meta)
    view.begin()
    target = LoadTarget(new_state(), 0, 1)
    assert view.files_read(target) == {"dcp_000001/__0_0.distcp", "extra_000001_rank0.pt"}
    changed = tuple(
        replace(artifact, digest=digest_of(b"x" * artifact.digest.size_bytes))
        if artifact.path.endswith(".metadata")
        else artifact
        for artifact in meta.artifacts
    )
    other = view_of(root, replace(meta, artifacts=changed))
    other.begin()
    assert (other.path / "dcp_000001/.metadata").exists()  # left there by an earlier start
    assert other.files_read(target) is None
