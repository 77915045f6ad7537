"""A large ``.metadata`` is tried in a child with limits before it is unpickled here."""

from __future__ import annotations

import pickle
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptmirror.core.errors import IntegrityError, Temporary, UnsafePickle
from ckptmirror.formats import vetting
from ckptmirror.formats.unpickle import loads_metadata
from tests.kit.hostile_files import called, dict_of, doubling_tuples, global_, nested_tuples, number, put, text, tuple_

FILLING = b"X" + struct.pack("<I", vetting.VET_FROM_BYTES) + b"x" * vetting.VET_FROM_BYTES + b"0"


def large(body: bytes) -> bytes:
    """A pickle that goes by the child: what it begins with is thrown away again."""
    return b"\x80\x04" + FILLING + body + b"."


@pytest.fixture(autouse=True)
def no_reading_of_opcodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the opcodes were read here")

    monkeypatch.setattr(vetting, "scan_pickle", refuse)


def test_honest_metadata_of_many_pieces_is_read() -> None:
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 8])) for row in range(40_000)]
    tensors = {"weight": TensorStorageMetadata(TensorProperties(), torch.Size([40_000, 8]), chunks)}
    honest = Metadata({**tensors, "note": BytesStorageMetadata()}, planner_data={"weight": ("weight",)})
    data = pickle.dumps(honest)
    assert len(data) > vetting.VET_FROM_BYTES
    assert loads_metadata(data, "here") == honest


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (called("posix", "system", text("touch owned")), "not on the allow-list"),
        (number(1) + put(0x7FFFFFFF), "more memory or time"),
        (dict_of((nested_tuples(300_000), number(1))), "more memory or time"),
        (dict_of((doubling_tuples(60), number(1))), "more memory or time"),
    ],
    ids=["a command", "a memo of gigabytes", "a key 300,000 deep", "a key that is hashed for hours"],
)
def test_what_the_limits_stop_in_the_child_is_refused(
    what: bytes, why: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vetting, "_FREE_S", 1)
    with pytest.raises(UnsafePickle, match=why):
        loads_metadata(large(what), "here")
    assert not (tmp_path / "owned").exists()


def test_what_starts_with_every_python_may_print_beside_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = "import atexit; print('[1]\\n{', end=''); atexit.register(print, '}'); "
    monkeypatch.setattr(vetting, "_CHILD", noise + vetting._CHILD)
    with pytest.raises(UnsafePickle, match=r"posix\.system, which is not on the allow-list"):
        loads_metadata(large(called("posix", "system", text("true"))), "here")


def test_a_class_that_a_large_pickle_changed_is_restored_and_said() -> None:
    changed = tuple_(b"N", dict_of((text("storage_data"), number(1))))  # a state of slots is set one by one
    changing = global_(Metadata.__module__, "Metadata") + changed + b"b0"
    honest = pickle.dumps(Metadata({}), protocol=2)[2:-1]
    with pytest.raises(UnsafePickle, match="tried to change the class Metadata"):
        loads_metadata(large(changing + honest), "here")
    assert Metadata.storage_data is None


def test_a_large_broken_pickle_is_an_integrity_error() -> None:
    with pytest.raises(IntegrityError, match="broken"):
        loads_metadata(large(b"")[:-1], "here")


def test_without_a_child_the_opcodes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(IntegrityError, match="the opcodes were read here"):
        loads_metadata(large(number(1)), "here")


def test_a_machine_that_is_too_busy_is_no_broken_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vetting, "_WALL_FACTOR", 0)
    with pytest.raises(Temporary, match="too busy"):
        loads_metadata(large(number(1)), "here")


def test_a_signal_to_the_training_is_none_to_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler signals whole process groups before it preempts: the last save must not look broken by that."""
    monkeypatch.setattr(sys, "path", [*sys.path, Path("a path, which Python ignores")])
    started: dict[str, Any] = {}
    run = subprocess.run

    def seen(*arguments: Any, **options: Any) -> Any:
        started.update(options)
        return run(*arguments, **options)

    monkeypatch.setattr(subprocess, "run", seen)
    with pytest.raises(IntegrityError, match="holds a int"):
        loads_metadata(large(number(1)), "here")
    assert started["start_new_session"]


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_child_that_somebody_ends_says_nothing_of_the_data(ended_by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], -ended_by, b"", b"")

    monkeypatch.setattr(subprocess, "run", ended)
    with pytest.raises(IntegrityError, match="the opcodes were read here"):
        loads_metadata(large(number(1)), "here")
