"""Kind dcp in one process: hostile and broken directories, failing disks, and torch's own readers."""

from __future__ import annotations

import enum
import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import CkptMirrorError, IntegrityError, LocalStorageFull, UnsafePickle, UsageError
from ckptmirror.core.model import Meta
from ckptmirror.formats import LoadTarget, TrainState, get_format
from ckptmirror.formats.artifacts import ArtifactStream
from ckptmirror.formats.capture import capture
from ckptmirror.formats.dcp_files import DirectoryWriter
from ckptmirror.formats.dcp_metadata import check_entries, check_ranges, loads_metadata
from ckptmirror.formats.dcp_read import read_directory_metadata, read_full_directory
from tests.kit.formats import SAVE_ID, context, files_below, load, make_state, same_bits, save, train


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Meta, TrainState]:
    state = make_state()
    train(state, 2)
    return tmp_path / "dcp_000200", save("dcp", tmp_path, state), state


Saved = tuple[Path, Meta, TrainState]


class _Exploit:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def _metadata(directory: Path) -> Metadata:
    metadata: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    return metadata


def _write(directory: Path, metadata: Metadata) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def _first(metadata: Metadata, name: str) -> tuple[MetadataIndex, Any]:
    return next((index, info) for index, info in metadata.storage_data.items() if index.fqn == name)


def test_code_in_the_metadata_is_not_run(saved: Saved, tmp_path: Path) -> None:
    directory, meta, _ = saved
    metadata = _metadata(directory)
    metadata.planner_data = _Exploit(tmp_path / "owned")
    _write(directory, metadata)
    with pytest.raises(UnsafePickle, match="mkdir"):
        load("dcp", tmp_path, meta, make_state())
    assert not (tmp_path / "owned").exists()


def test_code_in_a_plain_value_is_not_run(saved: Saved, tmp_path: Path) -> None:
    directory, meta, _ = saved
    metadata = _metadata(directory)
    _, info = _first(metadata, "optimizer.param_groups.0.lr")
    stream = io.BytesIO()
    torch.save(_Exploit(tmp_path / "owned"), stream)
    data = stream.getvalue()
    path = directory / info.relative_path
    info.offset, info.length = path.stat().st_size, len(data)
    path.write_bytes(path.read_bytes() + data)
    _write(directory, metadata)
    with pytest.raises(UnsafePickle, match="mkdir"):
        load("dcp", tmp_path, meta, make_state())
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "..", ".", "", "a/b", ".metadata", "x\0y", 7, None])
def test_a_file_outside_the_directory_is_not_read(saved: Saved, tmp_path: Path, path: Any) -> None:
    directory, meta, _ = saved
    metadata = _metadata(directory)
    _, info = _first(metadata, "model.inner.weight")
    info.relative_path = path
    _write(directory, metadata)
    with pytest.raises(IntegrityError, match=r"model\.inner\.weight is at"):
        load("dcp", tmp_path, meta, make_state())


def test_a_pickle_cannot_change_the_allowed_classes() -> None:
    class Poison:
        def __reduce__(self) -> tuple[Any, ...]:
            return (MetadataIndex, ("x",), (None, {}))

    # GLOBAL Metadata, then BUILD with slot state: it would set an attribute on the class itself.
    data = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}Vversion\nctorch\nSize\nstb."
    before = Metadata.version
    with pytest.raises(IntegrityError):
        loads_metadata(data, "here")
    assert Metadata.version is before
    with pytest.raises(IntegrityError):
        loads_metadata(pickle.dumps(Poison()), "here")


class _ByName(pickle.Pickler):
    """Pickles members of enumerations by name, as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_metadata_that_an_early_python_3_11_wrote_is_read(saved: Saved) -> None:
    metadata = _metadata(saved[0])
    written = io.BytesIO()
    _ByName(written).dump(metadata)
    assert b"getattr" in written.getvalue()
    read = loads_metadata(written.getvalue(), "here")
    assert read.state_dict_metadata == metadata.state_dict_metadata
    assert read.storage_data == metadata.storage_data
    assert read.planner_data == metadata.planner_data


@pytest.mark.parametrize(
    "asked",
    [
        b"ctorch\nSize\nV__new__",
        b"ctorch.distributed.checkpoint.metadata\nTensorProperties\nVcreate_from_tensor",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nV__init_subclass__",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n]",
    ],
)
def test_no_other_attribute_is_got_by_name(asked: bytes) -> None:
    with pytest.raises(IntegrityError):
        loads_metadata(b"cbuiltins\ngetattr\n(" + asked + b"\ntR.", "here")


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(len)])
def test_what_is_not_metadata_is_an_integrity_error(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        loads_metadata(data, "here")


def _check(metadata: Metadata, sizes: dict[str, int]) -> None:
    metadata = loads_metadata(pickle.dumps(metadata), "here")
    check_entries(metadata, "here")
    check_ranges(metadata, sizes, "here")


def test_every_damage_to_the_metadata_is_found(saved: Saved, tmp_path: Path) -> None:
    directory, _, _ = saved
    whole = (directory / ".metadata").read_bytes()
    name = "model.inner.weight"

    def shorter(metadata: Metadata) -> None:
        _first(metadata, name)[1].length = 3

    def beyond(metadata: Metadata) -> None:
        _first(metadata, name)[1].offset = 1 << 40

    def negative(metadata: Metadata) -> None:
        _first(metadata, name)[1].offset = -1

    def unwritten(metadata: Metadata) -> None:
        del metadata.storage_data[_first(metadata, name)[0]]

    def undescribed(metadata: Metadata) -> None:
        del metadata.state_dict_metadata[name]

    def uncovered(metadata: Metadata) -> None:
        metadata.state_dict_metadata[name].size = torch.Size([60, 6])  # type: ignore[union-attr]

    def overlapping(metadata: Metadata) -> None:
        _first(metadata, name)[1].offset -= 8

    def transformed(metadata: Metadata) -> None:
        _first(metadata, name)[1].transform_descriptors = ["stream.zstd"]

    sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.name != ".metadata"}
    for damage in (shorter, beyond, negative, unwritten, undescribed, uncovered, overlapping, transformed):
        metadata = pickle.loads(whole)
        damage(metadata)
        with pytest.raises(IntegrityError):
            _check(metadata, sizes)
    metadata = pickle.loads(whole)
    _check(metadata, sizes)
    with pytest.raises(IntegrityError, match="nothing refers to"):
        check_ranges(metadata, {**sizes, "stale": 1}, "here")


def test_the_check_refuses_what_differs_from_the_report(tmp_path: Path) -> None:
    here = context(tmp_path, ("dcp",))
    snapshot = capture(make_state(), step=200, kinds=("dcp",), rank=0, world_size=1)
    artifacts = get_format("dcp").write(snapshot, here)
    get_format("dcp").check(here, artifacts)
    directory = tmp_path / f"dcp_000200.{SAVE_ID[:8]}.tmp"
    shard = directory / "__0_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(IntegrityError, match="were reported"):
        get_format("dcp").check(here, artifacts)
    shard.write_bytes(whole)
    (directory / "stray").write_bytes(b"")
    with pytest.raises(IntegrityError, match="stray"):
        get_format("dcp").check(here, artifacts)
    (directory / "stray").unlink()
    (directory / ".metadata").unlink()
    with pytest.raises(IntegrityError, match="has no"):
        get_format("dcp").check(here, artifacts)


def test_torchs_own_readers_read_it(saved: Saved, tmp_path: Path) -> None:
    directory, _, state = saved
    other = make_state(seed=1)
    into = {
        "model": get_model_state_dict(other.model),
        "optimizer": get_optimizer_state_dict(other.model, other.optimizer),
    }
    dcp.load(into, checkpoint_id=str(directory))
    expected = get_optimizer_state_dict(state.model, state.optimizer)
    same_bits(expected["state"], into["optimizer"]["state"])
    same_bits(expected["param_groups"], into["optimizer"]["param_groups"])
    tensors = {k: v for k, v in get_model_state_dict(state.model).items() if isinstance(v, torch.Tensor)}
    same_bits(tensors, {k: into["model"][k] for k in tensors})
    dcp_to_torch_save(str(directory), str(tmp_path / "flat.pt"))
    flat = torch.load(tmp_path / "flat.pt", weights_only=True)
    same_bits(tensors, {k: flat["model"][k] for k in tensors})


def test_a_directory_that_torch_wrote_is_read(tmp_path: Path, saved: Saved) -> None:
    _, meta, state = saved
    root = tmp_path / "foreign"
    root.mkdir()
    content = {
        "model": get_model_state_dict(state.model),
        "optim": get_optimizer_state_dict(state.model, state.optimizer),
    }
    dcp.save(content, checkpoint_id=str(root / "dcp_000200"))
    other = make_state(seed=1)
    alone = replace(meta, artifacts=tuple(one for one in meta.artifacts if one.path.startswith("dcp_")))
    report = get_format("dcp").load(root, alone, LoadTarget(other, 0, 1))
    assert report.loaded == ("model", "optimizer")
    same_bits(state.optimizer.state_dict(), other.optimizer.state_dict())
    same_bits(dict(state.model.state_dict()), dict(other.model.state_dict()))


def test_the_metadata_names_no_path_of_this_machine(saved: Saved, tmp_path: Path) -> None:
    directory, _, _ = saved
    assert str(tmp_path).encode() not in (directory / ".metadata").read_bytes()
    assert FileSystemReader(directory).read_metadata().storage_meta.save_id == SAVE_ID


class _FullDisk(ArtifactStream):
    """A stream whose disk is full from the n-th write on."""

    writes_left = 3

    def write(self, data: Any) -> int:
        type(self).writes_left -= 1
        if type(self).writes_left < 0 and self.error is None:
            self.writer = _FullWriter()  # type: ignore[assignment]
        return super().write(data)


class _FullWriter:
    def write(self, _data: Any) -> int:
        raise LocalStorageFull("no space left on the device")

    def tell(self) -> int:
        return 0


@pytest.mark.parametrize("after", [0, 1, 5, 40, 200])
def test_dcp_side_thread_enospc_never_commits(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptmirror.formats.artifacts.ArtifactStream", _FullDisk)
    monkeypatch.setattr(_FullDisk, "writes_left", after)
    snapshot = capture(make_state(), step=200, kinds=("dcp",), rank=0, world_size=1)
    with pytest.raises(LocalStorageFull, match="rank 0: writing kind dcp: no space left"):
        get_format("dcp").write(snapshot, context(tmp_path, ("dcp",)))
    assert not any(path.name == ".metadata" for path in files_below(tmp_path))
    assert not any(path.name.endswith(".tmp") for path in files_below(tmp_path))


def test_one_thread_writes_since_torch_swallows_the_errors_of_others(tmp_path: Path) -> None:
    assert DirectoryWriter(tmp_path / "dcp", "dcp", SAVE_ID).thread_count == 1


def test_a_taken_name_in_the_directory_is_an_error(tmp_path: Path) -> None:
    snapshot = capture(make_state(), step=200, kinds=("dcp",), rank=0, world_size=1)
    here = context(tmp_path, ("dcp",))
    get_format("dcp").write(snapshot, here)
    with pytest.raises(CkptMirrorError):
        get_format("dcp").write(snapshot, here)


def test_an_empty_state_dict_entry_and_number_keys_survive(tmp_path: Path) -> None:
    class Odd(torch.nn.Linear):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    state = TrainState(model=Odd(2, 2))
    state.model.extra = {"none": None, "nested": {"empty": {}, 3: [1, {"x": ()}]}}
    meta = save("dcp", tmp_path, state)
    other = Odd(2, 2)
    load("dcp", tmp_path, meta, TrainState(model=other))
    assert other.extra == state.model.extra


def test_the_whole_state_is_read_without_a_model(saved: Saved) -> None:
    directory, _, state = saved
    tree = read_full_directory(directory)
    same_bits(get_model_state_dict(state.model), tree["model"])
    expected = get_optimizer_state_dict(state.model, state.optimizer)
    same_bits(expected["state"], tree["optimizer"]["state"])
    same_bits(expected["param_groups"], tree["optimizer"]["param_groups"])
    (directory / "__0_0.distcp").unlink()
    with pytest.raises(IntegrityError, match="missing"):
        read_full_directory(directory)


def test_a_tensor_of_an_absurd_size_is_an_integrity_error(saved: Saved, tmp_path: Path) -> None:
    directory, meta, _ = saved
    metadata = _metadata(directory)
    entry = metadata.state_dict_metadata["optimizer.state.inner.weight.exp_avg"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 40, 6])  # type: ignore[union-attr]
    _, info = _first(metadata, "optimizer.state.inner.weight.exp_avg")
    info.length, info.relative_path = 1 << 46, "on-another-node"
    _write(directory, metadata)
    with pytest.raises(IntegrityError):
        load("dcp", tmp_path, meta, make_state())


def test_reading_the_metadata_of_a_missing_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="missing"):
        read_directory_metadata(tmp_path / "nowhere")


def test_a_model_without_tensors_comes_back(tmp_path: Path) -> None:
    def new(value: float) -> TrainState:
        critic = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(critic.weight, value)
        return TrainState(model=torch.nn.Identity(), extra={"critic": critic})

    with CheckpointManager(tmp_path) as manager:
        manager.resume(new(1.0))
        manager.save(1, new(2.0)).wait()
    state = new(3.0)
    with CheckpointManager(tmp_path) as manager:
        start = manager.resume(state)
    assert start is not None
    assert start.missing == ()
    assert state.extra is not None
    assert state.extra["critic"].weight.eq(2.0).all()
    assert read_full_directory(tmp_path / "dcp_000001")["model"] == {}
    with pytest.raises(UsageError, match="holds no model"), CheckpointManager(tmp_path) as manager:
        manager.resume(TrainState(model=torch.nn.Linear(2, 2)))


def test_tensors_of_an_optimizer_keep_the_order_of_their_axes_in_memory(tmp_path: Path) -> None:
    def new() -> TrainState:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3, bias=False)
        return TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    state = new()
    weight = state.model.weight
    basis = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    state.optimizer.state[weight] = {"basis": basis, "like": torch.ones(4, 3).t(), "nested": [{"row": basis[0].t()}]}
    with CheckpointManager(tmp_path, kinds=("dcp",)) as manager:
        manager.resume(new())
        manager.save(1, state).wait()
    other = new()
    with CheckpointManager(tmp_path, kinds=("dcp",)) as manager:
        manager.resume(other)
    back = other.optimizer.state[other.model.weight]
    assert back["basis"].equal(basis)
    assert back["basis"].stride() == basis.stride()
    assert back["like"].equal(torch.ones(3, 4))
    assert back["nested"][0]["row"].equal(basis[0].t())
    plain = read_directory_metadata(tmp_path / "dcp_000001").state_dict_metadata
    assert "optimizer.state.weight.like" in plain  # as any reader of the format expects it


def test_a_torch_that_completes_a_copy_of_the_metadata_can_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch before 2.12 does."""
    finish = FileSystemWriter.finish
    monkeypatch.setattr(
        FileSystemWriter, "finish", lambda self, metadata, results: finish(self, replace(metadata), results)
    )
    state, other = make_state(), make_state(1)
    meta = save("dcp", tmp_path, state)
    load("dcp", tmp_path, meta, other)
    same_bits(other.model.state_dict(), state.model.state_dict())
