"""The bytes of .pt files and sidecars: sizes, sums, memory, pieces, plain values."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ckptmirror.core.errors import IntegrityError, LocalStorageFull, UnsafePickle
from ckptmirror.core.model import Kind
from ckptmirror.core.regions import Region
from ckptmirror.formats.artifacts import ArtifactStream, stream_to, write_pt
from ckptmirror.formats.capture import capture
from ckptmirror.formats.read_full import read_extra
from ckptmirror.formats.shards import Piece, fill, read_pieces
from ckptmirror.formats.sidecars import tensor_list, write_sidecars
from ckptmirror.formats.tensor_bytes import compact
from ckptmirror.formats.train_state import TrainState
from ckptmirror.formats.weights_only_values import MARK, decode, encode
from ckptmirror.local.checksummed_writer import ArtifactWriter
from ckptmirror.local.checksums import crc32c, verify_file
from ckptmirror.sums.digests import byte_view, digest32, sum32_there
from ckptmirror.sums.fingerprints import fingerprint
from ckptmirror.untrusted.tensor_files import load_bytes, load_pt
from tests.kit.formats import KINDS, SAVE_ID, context, load, make_state, same_bits, save, train


def test_pieces_of_a_shared_arena_are_written_without_the_rest_of_it(tmp_path: Path) -> None:
    arena = torch.arange(1 << 20, dtype=torch.uint8)
    weight = arena[4096:8192].view(torch.float32).view(32, 32)
    tree = {
        "weight": weight,
        "tied": arena[4096:8192].view(torch.float32).view(32, 32),
        "step": arena[:4].view(torch.int32),
    }
    digest = write_pt(tree, tmp_path / "x.pt", save_id=SAVE_ID, publish=True)
    assert digest.size_bytes < 10_000
    verify_file(tmp_path / "x.pt", digest)
    loaded = load_pt(tmp_path / "x.pt")
    same_bits(tree, loaded)
    assert loaded["weight"].data_ptr() == loaded["tied"].data_ptr()


def test_compact_copies_nothing_that_is_contiguous() -> None:
    arena = torch.randn(1000)
    part, alone = arena[10:20], torch.randn(5)
    made = compact({"part": part, "alone": alone})
    assert made["part"].data_ptr() == part.data_ptr()
    assert made["part"].untyped_storage().nbytes() == 40
    assert made["alone"] is alone


def test_the_memory_outlives_the_arena_as_long_as_a_part_is_held() -> None:
    arena = torch.full((1 << 16,), 7.0)
    part = compact([arena[5:9]])[0]
    del arena
    torch.zeros(1 << 16)
    assert part.tolist() == [7.0] * 4


def test_one_address_under_two_dtypes_is_written(tmp_path: Path) -> None:
    words = torch.arange(4, dtype=torch.int32)
    tree = {"int": words, "float": words.view(torch.float32)}
    write_pt(tree, tmp_path / "x.pt", save_id=SAVE_ID, publish=True)
    same_bits(tree, load_pt(tmp_path / "x.pt"))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_every_dtype_and_form_is_written_and_summed(dtype: torch.dtype, tmp_path: Path) -> None:
    base = torch.arange(-12, 12).reshape(4, 6).to(dtype)
    tree = {
        "dense": base,
        "strided": base.t(),
        "column": base[:, 1],
        "scalar": base[0, 0],
        "empty": base[:0],
        "slice": base[1:3],
    }
    write_pt(tree, tmp_path / "x.pt", save_id=SAVE_ID, publish=True)
    same_bits(tree, load_pt(tmp_path / "x.pt"))
    for tensor in tree.values():
        raw = bytes(byte_view(tensor.contiguous()))
        padded = raw + bytes(-len(raw) % 4)
        words = [int.from_bytes(padded[i : i + 4], "little") for i in range(0, len(padded), 4)]
        assert digest32(tensor) == (sum(words) & 0xFFFFFFFF, crc32c(raw))


def sum32(tensor: torch.Tensor) -> int:
    return digest32(tensor)[0]


def test_sums_of_pieces_add_up_to_the_whole() -> None:
    whole = torch.randn(301, 8)
    for cut in (1, 7, 150):
        assert (sum32(whole[:cut]) + sum32(whole[cut:])) & 0xFFFFFFFF == sum32(whole)
    assert (sum32(whole[:, :3]) + sum32(whole[:, 3:])) & 0xFFFFFFFF == sum32(whole)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 3),
        torch.randn(7, 3).t(),
        torch.randn(7, 3).bfloat16(),
        torch.randn(7, 3).bfloat16()[1:, 1],
        torch.randn(9).bfloat16()[1:],
        torch.randn(3, 5, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.arange(7, dtype=torch.uint8),
        torch.arange(-3, 3),
        torch.tensor([True, False, True]),
        torch.tensor(2.5),
        torch.tensor(-3),
        torch.empty(0, 4),
        torch.full((70_000,), 1 << 30, dtype=torch.int32),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)
def test_a_sum_taken_where_the_tensor_is_is_that_of_its_copy(tensor: torch.Tensor) -> None:
    there = sum32_there(tensor)
    assert there.dim() == 0
    assert int(there) & 0xFFFFFFFF == sum32(tensor.clone().resolve_conj().resolve_neg())


def test_writing_needs_little_memory_beside_the_tensor(tmp_path: Path) -> None:
    code = f"""
import resource, torch
from pathlib import Path
from ckptmirror.formats.artifacts import write_pt
big = torch.ones(64 << 20, dtype=torch.float32)
write_pt({{"x": torch.ones(1 << 20)}}, Path({str(tmp_path)!r}) / "warm.pt", save_id={SAVE_ID!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_pt({{"big": big}}, Path({str(tmp_path)!r}) / "big.pt", save_id={SAVE_ID!r})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 64 * 1024  # KiB; the tensor has 256 MiB


def test_the_error_of_the_disk_is_raised_not_what_torch_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(ArtifactStream):
        def write(self, data: Any) -> int:
            self.error = self.error or LocalStorageFull("no space left on the device")
            return super().write(data)

    monkeypatch.setattr("ckptmirror.formats.artifacts.ArtifactStream", Full)
    with pytest.raises(LocalStorageFull, match="no space left"):
        write_pt({"x": torch.zeros(10)}, tmp_path / "x.pt", save_id=SAVE_ID)
    assert list(tmp_path.iterdir()) == []


def test_small_and_large_pieces_stay_in_order(tmp_path: Path) -> None:
    pieces = [bytes([number]) * size for number, size in enumerate((1, 100_000, 7, 65_536, 65_535, 1, 0, 3))]
    with ArtifactWriter(tmp_path / "x.bin", SAVE_ID) as writer:
        with stream_to(writer) as stream:
            for number, piece in enumerate(pieces, start=1):
                assert stream.write(memoryview(bytearray(piece))) == len(piece)
                assert stream.tell() == sum(map(len, pieces[:number]))
        writer.publish()
    assert (tmp_path / "x.bin").read_bytes() == b"".join(pieces)


def test_the_model_file_is_a_plain_state_dict(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1)
    save("model", tmp_path, state)
    plain = torch.load(tmp_path / "model_000200.pt", weights_only=True)
    other = make_state(seed=1)
    other.model.load_state_dict(plain)
    same_bits(dict(state.model.state_dict()), dict(other.model.state_dict()))
    optimizer = torch.load(tmp_path / "optim_000200_rank0.pt", weights_only=True)
    assert set(optimizer) == {"state", "param_groups"}
    assert "inner.weight" in optimizer["state"]


def test_a_foreign_file_with_the_marks_of_wrappers_is_read(tmp_path: Path) -> None:
    from ckptmirror.formats.load_model import load_model

    state, other = make_state(), make_state(seed=1)
    for mark in ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
        saved = {mark + name: value for name, value in state.model.state_dict().items()}
        load_model(other.model, saved)
        same_bits(dict(state.model.state_dict()), dict(other.model.state_dict()))


def test_the_tensor_list_is_equal_for_equal_tensors_and_names_every_one(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1)
    first, second = (capture(state, step=step, kinds=("dcp",), rank=0, world_size=1) for step in (1, 2))
    listed = tensor_list(first, rank=0, world_size=1)
    assert listed == tensor_list(second, rank=0, world_size=1)
    write_sidecars(first, context(tmp_path, ("dcp",)))
    on_disk = json.loads((tmp_path / f"tensors_000200_rank0.json.{SAVE_ID[:8]}.tmp").read_text())
    assert on_disk == listed
    weight = next(entry for entry in listed["tensors"] if entry["name"] == "model.inner.weight")
    assert (weight["shape"], weight["dtype"], weight["offsets"], weight["sizes"]) == ([6, 6], "float32", [0, 0], [6, 6])
    assert weight["crc32c"] == crc32c(byte_view(state.model.inner.weight))
    assert weight["fingerprint"] == list(fingerprint(state.model.inner.weight, Region((6, 6), (0, 0), (6, 6))))
    assert all("fingerprint" in entry for entry in listed["tensors"])


def test_pieces_fill_a_region_from_any_cut() -> None:
    whole = torch.arange(70.0).reshape(7, 10)
    pieces = [
        Piece(
            Region((7, 10), (row, column), (min(3, 7 - row), min(4, 10 - column))),
            whole[row : row + 3, column : column + 4],
        )
        for row in range(0, 7, 3)
        for column in range(0, 10, 4)
    ]
    target = torch.empty(4, 5)
    fill(target, Region((7, 10), (2, 3), (4, 5)), pieces, "x")
    assert torch.equal(target, whole[2:6, 3:8])
    with pytest.raises(IntegrityError, match="x: the saved pieces hold"):
        fill(target, Region((7, 10), (2, 3), (4, 5)), pieces[:4], "x")
    with pytest.raises(IntegrityError, match="is of shape"):
        fill(target, Region((4, 5), (0, 0), (4, 5)), pieces, "x")


def test_the_same_piece_twice_does_not_count_twice() -> None:
    half = Piece(Region((4,), (0,), (2,)), torch.zeros(2))
    with pytest.raises(IntegrityError):
        fill(torch.empty(4), Region((4,), (0,), (4,)), [half, half], "x")


@pytest.mark.parametrize(
    "value",
    [
        {MARK: "unknown"},
        {MARK: "counter"},
        {MARK: "defaultdict", "factory": "eval", "items": []},
        {MARK: "array", "dtype": "O", "shape": [1], "data": torch.zeros(8, dtype=torch.uint8)},
        {MARK: ["x"]},
        {MARK: "shard", "shape": [2], "offsets": [1], "data": torch.zeros(2)},
        {MARK: "shard", "shape": [2], "offsets": [-1], "data": torch.zeros(1)},
        {MARK: "shard"},
    ],
)
def test_broken_marks_are_integrity_errors(value: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        read_pieces(value)


def test_a_dict_that_carries_what_no_save_has_is_an_integrity_error() -> None:
    for name, value, why in (("forward", 1, "gives a state to"), ("_metadata", [1], "numbers and text")):
        ordered: OrderedDict[str, int] = OrderedDict()
        setattr(ordered, name, value)
        stream = io.BytesIO()
        torch.save({"model": ordered}, stream)
        with pytest.raises(IntegrityError, match=why):
            decode(load_bytes(stream.getvalue(), "it"))


def test_encoding_and_decoding_are_inverse_for_random_state_of_optimizers() -> None:
    value = {"a": [1, (2.5, None)], 3: {"x": {1, 2}}, (1, "b"): b"raw", "t": torch.ones(2)}
    again = decode(encode(value, "x"))
    same_bits(value["t"], again.pop("t"))
    value.pop("t")
    assert again == value


def test_a_pickle_in_the_place_of_tensors_is_unsafe(tmp_path: Path) -> None:
    class Exploit:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.mkdir, (tmp_path / "owned",))

    torch.save({"x": Exploit()}, tmp_path / "x.pt")
    for mmap in (False, True):
        with pytest.raises(UnsafePickle, match=r"x\.pt"):
            load_pt(tmp_path / "x.pt", mmap=mmap)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_a_look_without_live_objects_gives_the_same_kinds(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    state.extra = {"ordered": OrderedDict(b=1, a=[torch.ones(2)]), "recent": (deque([torch.zeros(1)], maxlen=2),)}
    extra = read_extra(tmp_path, save(kind, tmp_path, state))
    assert extra is not None
    found = extra["extra"]
    assert (type(found["ordered"]), list(found["ordered"])) == (OrderedDict, ["b", "a"])
    assert (type(found["recent"]), found["recent"][0].maxlen) == (tuple, 2)


class Point(NamedTuple):
    """A kind of the user's own, which a safe load may be told to take."""

    x: Any
    y: Any


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_a_kind_that_the_user_allowed_comes_back_whole(kind: Kind, tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Point]):
        state = make_state()
        state.extra = {"point": Point(1, [2])}
        meta = save(kind, tmp_path, state)
        other = make_state(seed=1)
        other.extra = {}
        load(kind, tmp_path, meta, other)
    assert type(other.extra["point"]) is Point
    assert other.extra["point"] == Point(1, [2])


@pytest.mark.parametrize("part", ["model", "extra"])
def test_an_emergency_snapshot_without_a_part_is_refused_before_anything_changes(part: str, tmp_path: Path) -> None:
    meta = save("emergency", tmp_path, make_state())
    (path,) = tmp_path.glob("*/rank0.pt")
    content = load_pt(path)
    del content[part]
    torch.save(content, path)
    other = make_state(seed=1)
    before = {name: value.clone() for name, value in other.model.named_parameters()}
    with pytest.raises(IntegrityError, match="not an emergency snapshot"):
        load("emergency", tmp_path, meta, other)
    same_bits(before, dict(other.model.named_parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_conjugate_and_a_negative_view_of_one_storage_come_back(tmp_path: Path, kind: Kind) -> None:
    def state(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 3)
        turned = torch.randn(5, dtype=torch.complex64).conj()
        model.register_buffer("conjugate", turned)
        model.register_buffer("negative", turned.imag)
        return TrainState(model=model)

    saved, loaded = state(0), state(1)
    load(kind, tmp_path, save(kind, tmp_path, saved), loaded)
    assert all(torch.equal(*pair) for pair in zip(loaded.model.buffers(), saved.model.buffers(), strict=True))
