"""Mirrors through fsspec, beside one that is required: saved to, staged from, never the only word."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, ResumeInfo, TrainState, load_checkpoint, stage_checkpoint_step
from ckptmirror.core.errors import (
    ConfigError,
    NotAuthorised,
    ObjectNotFound,
    PreconditionFailed,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.core.events import Event, StoreCalled
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.flow.places.resolve import list_checkpoints
from ckptmirror.flow.start.forget import forget_mirror
from ckptmirror.stores import fsspec_any, open_store
from ckptmirror.testing import GcsServerProcess
from tests.kit.mirrors import memory_url
from tests.kit.training import everything, new_state, running, same, train

pytestmark = pytest.mark.long


def resume_from(root: Path, url: str) -> tuple[ResumeInfo | None, TrainState]:
    with running(root, MirrorSpec(url, required=False)) as manager:
        state = new_state(seed=5)
        return manager.resume(state), state


@pytest.fixture(params=["gcsfs+gs", "fsspec+memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "fsspec+memory":
        yield f"fsspec+memory://bucket-{uuid.uuid4().hex}/run"
    else:
        with GcsServerProcess(tmp_path / "server", buckets=["bucket"]) as server:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
            yield "gcsfs+gs://bucket/run"


def test_an_optional_mirror_through_fsspec_gets_every_save_and_gives_it_back(tmp_path: Path, url: str) -> None:
    required = memory_url()
    told: list[Event] = []
    with CheckpointManager(tmp_path / "root", [required, MirrorSpec(url, required=False)]) as manager:
        manager.events.subscribe(told.append)
        state = new_state()
        manager.resume(state)
        for step in (1, 2):
            train(state)
            manager.save(step, state).wait()
        saved = everything(state)
        manager.wait("mirrored", timeout_s=60)
        from ckptmirror.flow.drain import drain

        assert drain(tmp_path / "root", timeout_s=60).is_verified
    assert [line.step for line in list_checkpoints(url) if line.standing == "current"] == [1, 2]
    for kind in ("dcp", "model"):
        staged = stage_checkpoint_step(url, step=2, dest=tmp_path / "eval", require_kind=kind)  # type: ignore[arg-type]
        assert same(load_checkpoint(staged.path).model, dict(saved["model"]))
    assert {call.operation for call in told if isinstance(call, StoreCalled) and call.mirror == url} >= {"upload"}
    with pytest.raises(StoreTemporary, match="no longer configured"):  # it alone may have more
        resume_from(tmp_path / "fresh", url)
    forget_mirror(tmp_path / "fresh", required)
    start, fresh = resume_from(tmp_path / "fresh", url)
    assert start is not None
    assert same(everything(fresh), saved)


def test_a_mirror_that_cannot_compare_and_swap_is_no_required_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        CheckpointManager(tmp_path, ["fsspec+memory://bucket/run"])
    assert "required=False" in refused.value.hint


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("s3://bucket/run", "s3fs"),
        ("fsspec+file:///tmp/x", "file://"),
        ("local://tmp/x", "file://"),
        ("fsspec+nowhere://bucket/run", "no store"),
    ],
)
def test_what_fsspec_cannot_open_here_is_a_sentence(url: str, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store(url).stat("x")
    assert what in f"{refused.value} {refused.value.hint}"


def test_what_a_file_system_raises_is_an_error_of_ours() -> None:
    store = fsspec_any.open("fsspec+memory://bucket/run")
    for raised, expected in (
        (OSError("busy"), StoreTemporary),
        (PermissionError("no"), NotAuthorised),
        (FileNotFoundError("x"), ObjectNotFound),
        (FileExistsError("x"), PreconditionFailed),
        (NotImplementedError(), StorePermanent),
    ):
        with pytest.raises(expected) as told, store._explained("test"):
            raise raised
        assert "gcloud" not in told.value.hint
