"""A ``.pt`` file of somebody who means harm is refused in an instant, before anything is made of it."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ckptmirror import load_checkpoint
from ckptmirror.core.errors import IntegrityError, UnsafePickle, UsageError
from ckptmirror.core.regions import Region
from ckptmirror.formats import LoadTarget, TrainState
from ckptmirror.formats.legacy import load_legacy, read_legacy
from ckptmirror.formats.rank_files import RankFiles
from ckptmirror.formats.rng import capture_rng, load_rng
from ckptmirror.formats.shards import Piece, fill
from ckptmirror.formats.weights_only_values import decode, encode
from ckptmirror.untrusted import pickles, read_limits
from ckptmirror.untrusted.tensor_files import load_bytes, load_pt
from tests.kit.hostile_files import (
    ARCHIVES,
    Record,
    archive,
    called,
    dict_of,
    get,
    global_,
    nested_lists,
    number,
    pickled,
    pt,
    put,
    storage,
    text,
    tuple_,
)
from tests.kit.legacy import write_meta

pytestmark = pytest.mark.long

# Reads every file as a load does. The limits: what one file may take, of memory beyond the program and of time.
_READER = """
import json, os, resource, sys
from pathlib import Path
import torch
from ckptmirror.core.errors import IntegrityError
from ckptmirror.formats.weights_only_values import decode, encode
from ckptmirror.formats.rank_files import RankFiles
from ckptmirror.untrusted.tensor_files import load_pt

torch.set_num_threads(1)
with open("/proc/self/statm") as facts:
    size_bytes = int(facts.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size_bytes + (256 << 20), -1))
resource.setrlimit(resource.RLIMIT_CPU, (200, 200))
for name in sys.argv[1:]:
    try:
        decode(load_pt(Path(name)))
        end = "loaded"
    except IntegrityError as error:
        end = str(error)
    print(json.dumps([name, end]), flush=True)
"""


def _read_in_a_child(folder: Path, files: dict[str, bytes]) -> dict[str, str]:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _READER, *files],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    found: dict[str, str] = {}
    for line in ended.stdout.splitlines():
        name, end = json.loads(line)
        found[name] = end
    assert ended.returncode == 0, (list(found)[-1:], ended.stderr[-2000:])
    return found


def test_every_hostile_archive_is_refused_within_256_mib_and_without_hours_of_work(tmp_path: Path) -> None:
    files = {name: make() for name, make in ARCHIVES.items()}
    found = _read_in_a_child(tmp_path, files)
    assert set(found) == set(files)
    for name, end in found.items():
        assert end.startswith(name), (name, end)
        assert f"{name} is broken" not in end, "it came as far as torch"
    assert not (tmp_path / "owned").exists()


_SMALL = [
    name
    for name in ARCHIVES
    if not any(word in name for word in ("hours", "deep", "bytearray", "1000:1", "million lists"))
]


@pytest.mark.parametrize("what", _SMALL)
def test_a_hostile_archive_is_refused_by_name_with_one_short_line(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model_000200.pt"
    path.write_bytes(ARCHIVES[what]())
    for load in (lambda: load_pt(path), lambda: load_bytes(path.read_bytes(), str(path))):
        with pytest.raises(IntegrityError) as caught:
            load()
        assert str(path) in caught.value.message
        assert len(caught.value.message) < 500
        assert "\n" not in caught.value.message


def _saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, "text", None, True, b"bytes", 10**300], "b": {(1, "x"): {3, 4}}},
        Counter("abracadabra"),
        bytearray(b"abc"),
        torch.Size([3, 4]),
        torch.device("cpu"),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(3, 4).t(),
        torch.ones(1).expand(1000, 1000),
        torch.empty(0),
        torch.eye(3).to_sparse(),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        torch.ones(3, dtype=torch.complex64),
        torch.empty(3, device="meta"),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_what_torch_saves_honestly_is_loaded(value: Any) -> None:
    loaded = load_bytes(_saved(value).getvalue(), "here")
    assert type(loaded) is type(value)
    if not isinstance(value, torch.Tensor):
        assert loaded == value


def test_the_same_values_in_many_places_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = list(range(1000))
    assert load_bytes(_saved([shared] * 900).getvalue(), "here") == [shared] * 900
    monkeypatch.setattr(pickles, "FREE_BYTES", 300)
    for weight in (torch.ones(3), torch.nn.Parameter(torch.ones(3))):
        assert len(load_bytes(_saved([weight] * 10_000).getvalue(), "here")) == 10_000


def test_what_is_nested_as_deep_as_is_allowed_is_loaded_and_decoded(tmp_path: Path) -> None:
    for depth, is_allowed in ((333, True), (334, False)):
        path = tmp_path / f"{depth}.pt"
        path.write_bytes(pt(nested_lists(depth)))
        if is_allowed:
            decode(load_pt(path))
        else:
            with pytest.raises(UnsafePickle, match="nested more than 333 deep"):
                load_pt(path)


@pytest.mark.parametrize(
    "value",
    [
        [[] for _ in range(5000)],
        [{} for _ in range(5000)],
        [()] * 5000,
        [[i] for i in range(5000)],
        [(i,) for i in range(5000)],
        {(i, i + 1): () for i in range(5000)},
        {(): {()}, ((), ()): {(), 1}},
        [bytearray(b"x") for _ in range(1000)],
        [torch.Size([i]) for i in range(1000)],
        ["x" * 100_000, b"\xff" * 100_000],
    ],
    ids=["lists", "dicts", "empty tuples", "lists of one", "tuples", "keys", "empty keys", "bytes", "sizes", "texts"],
)
def test_no_limit_is_one_of_size_alone(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Honest values of any number are loaded: beyond what is free, each comes with enough bytes of its own."""
    for module in (pickles, read_limits):
        monkeypatch.setattr(module, "FREE_BYTES", 40_000)  # the first 256 are shorter
    assert load_bytes(_saved(value).getvalue(), "here") == value


def test_an_archive_by_hand_is_one_that_torch_reads(tmp_path: Path) -> None:
    """Otherwise the others were refused for their form."""
    path = tmp_path / "x.pt"
    path.write_bytes(pt(dict_of((text("a"), number(1)), (text("b"), b"]" + put(0) + get(0) + b"\x86"))))
    assert load_pt(path) == torch.load(path, weights_only=True) == {"a": 1, "b": ([], [])}
    many = archive(Record("data.pkl", pickled(number(7))), *(Record(f"x/{i}", b"") for i in range(70_000)))
    path.write_bytes(many)
    assert load_pt(path) == 7


def _beside(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with another one as its attribute."""
    shown = torch.ones(1)
    shown.hidden = tensor  # type: ignore[attr-defined]
    return shown


@pytest.mark.parametrize(
    "within",
    [
        lambda tensor: {"a": [(1, tensor)]},
        lambda tensor: {tensor: 1},
        _beside,
        lambda tensor: torch.nn.Parameter(tensor),
    ],
    ids=["containers", "key", "attribute", "parameter"],
)
def test_indices_of_a_sparse_tensor_outside_of_it_are_refused(within: Any, tmp_path: Path) -> None:
    """From 2.15 on torch looks at the indices itself, and has words of its own for what it finds."""
    outside = torch.sparse_coo_tensor(torch.tensor([[10**9]]), torch.ones(1), (10,), check_invariants=False)
    saved = _saved(within(outside))
    with pytest.raises(IntegrityError, match=r"describes a broken value|here is broken"):
        load_bytes(saved.getvalue(), "here")
    (tmp_path / "x.pt").write_bytes(saved.getvalue())
    with pytest.raises(IntegrityError, match=r"describes a broken value|x\.pt is broken"):
        load_pt(tmp_path / "x.pt", mmap=True)


def test_the_switch_of_the_process_for_sparse_tensors_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of the trainer would see it flip."""

    def flip(_: bool) -> None:
        raise AssertionError("it flips")

    monkeypatch.setattr(torch._C, "_set_check_sparse_tensor_invariants", flip)
    assert load_bytes(_saved(torch.eye(3).to_sparse()).getvalue(), "here").is_sparse


def test_a_sparse_tensor_of_a_layout_that_no_save_takes_is_refused() -> None:
    with pytest.raises(UnsafePickle, match=r"names a layout 'torch\.sparse_csr'"):
        load_bytes(_saved(torch.eye(3).to_sparse_csr()).getvalue(), "here")


def test_a_call_of_what_a_user_allowed_is_left_to_the_user(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(pt(called("fractions", "Fraction", number(1), number(3))))
    from fractions import Fraction

    with pytest.raises(UnsafePickle, match="Fraction"):
        load_pt(path)
    with torch.serialization.safe_globals([Fraction]):
        assert load_pt(path) == Fraction(1, 3)


class Marked(torch.Tensor):
    """A kind of tensor of the user's own."""


def test_what_a_user_allowed_comes_back_as_torch_has_it() -> None:
    values = {
        "number": numpy.float64(1.5),
        "array": numpy.arange(3),
        "tensor": torch.ones(3).as_subclass(Marked),  # type: ignore[no-untyped-call]  # as torch has it
    }
    values["tensor"].note = [1]
    data = _saved(values).getvalue()
    with pytest.raises(UnsafePickle, match="numpy"):
        load_bytes(data, "here")
    multiarray = importlib.import_module(
        "numpy._core.multiarray" if numpy.__version__ >= "2" else "numpy.core.multiarray"
    )
    dtypes = [type(numpy.dtype(kind)) for kind in (numpy.float64, numpy.int64)]
    with torch.serialization.safe_globals(
        [multiarray.scalar, multiarray._reconstruct, numpy.ndarray, numpy.dtype, Marked, *dtypes]
    ):
        found = load_bytes(data, "here")
    assert type(found["number"]) is numpy.float64
    assert found["number"] == 1.5
    assert found["array"].tolist() == [0, 1, 2]
    assert type(found["tensor"]) is Marked
    assert found["tensor"].note == [1]
    assert found["tensor"].tolist() == [1.0, 1.0, 1.0]


def test_a_counter_with_keys_of_tuples_is_read_as_it_was() -> None:
    value = Counter({(): 3, (1, 2): 5, "a": 1})
    assert load_bytes(_saved(value).getvalue(), "here") == value


def test_pairs_of_keys_of_one_hash_are_loaded_in_any_number() -> None:
    value = {(x, y): 0 for x in (-1, -2) for y in range(3000)}
    assert load_bytes(_saved(value).getvalue(), "here") == value
    assert decode(encode({"s": {torch.float32}, "c": Counter({torch.float32: 1})}, "x")) == {
        "s": {torch.float32},
        "c": Counter({torch.float32: 1}),
    }


def test_a_record_at_the_end_of_all_numbers_is_broken() -> None:
    data = bytearray(pt(number(1)))
    at = data.index(b"PK\1\2") + 42
    data[at : at + 4] = b"\xfe\xff\xff\xff"
    with pytest.raises(IntegrityError, match="names a place where no record begins"):
        load_bytes(bytes(data), "here")


def test_pieces_that_overlap_and_leave_a_gap_fill_nothing() -> None:
    pieces = [Piece(Region((10,), (begin,), (6,)), torch.ones(6)) for begin in (0, 1)]
    with pytest.raises(IntegrityError, match="x: the saved pieces overlap"):
        fill(torch.empty(10), Region((10,), (0,), (10,)), pieces, "x")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("numpy", {"position": 10**9}),
        ("numpy", {"position": -1}),
        ("numpy", {"words": torch.full((624,), -1)}),
        ("numpy", {"gauss": 10**400}),
        ("numpy", {"has_gauss": 7}),
        ("python", {"words": torch.full((625,), -1)}),
        ("python", {"gauss": "x"}),
    ],
)
def test_a_broken_generator_is_refused_before_any_is_set(part: str, change: dict[str, Any]) -> None:
    saved = capture_rng()
    assert load_rng(saved) == []
    before = random.random(), random.getstate(), torch.get_rng_state()
    with pytest.raises(IntegrityError, match="random number generator is broken"):
        load_rng({**saved, part: {**saved[part], **change}})
    assert random.getstate() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


ODD_LEGACY = {
    "meta": {"model": {"w": torch.zeros(2, device="meta"), "b": torch.ones(2)}},
    "sparse": {"model": {"w": torch.ones(2).to_sparse(), "b": torch.ones(2)}},
    "key": {"model": {torch.float32: torch.ones(2)}},
    "state": {"optimizer": {"state": torch.ones(2), "param_groups": [{"params": [0, 1]}]}},
    "params": {"optimizer": {"state": {}, "param_groups": [{"params": 1.5}]}},
    "position": {"optimizer": {"state": {}, "param_groups": [{"params": [[], {}]}]}},
    "names": {"optimizer": {"state": {}, "param_groups": [{"params": [0, 1], "param_names": 3}]}},
    "group": {"optimizer": {"state": {}, "param_groups": [torch.float32]}},
    "bare group": {"optimizer": {"state": {}, "param_groups": [{"params": [0, 1]}, {"lr": 0.1}]}},
}


@pytest.mark.parametrize("what", ODD_LEGACY)
def test_a_legacy_checkpoint_of_odd_types_is_refused_or_left_in_its_own_words(what: str, tmp_path: Path) -> None:
    model = torch.nn.Module()
    for name in ("w", "b"):
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(2)))
    state = TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    path = tmp_path / "model.pt"
    torch.save({"model": {"w": torch.ones(2), "b": torch.ones(2)}, **ODD_LEGACY[what]}, path)
    try:
        report = load_legacy(read_legacy(path, "model", None), path, LoadTarget(state, 0, 1), 1)
    except (IntegrityError, UsageError):
        assert not model.b.any()  # nothing was copied before
    else:
        assert "optimizer" not in report.loaded


class Colour(Enum):
    """One member for the whole program."""

    RED = 1


def test_a_file_changes_no_member_of_an_enumeration() -> None:
    made = called(Colour.__module__, "Colour", number(1)) + dict_of((text("_value_"), number(99))) + b"b"
    with torch.serialization.safe_globals([Colour]), pytest.raises(UnsafePickle, match="one for the whole process"):
        load_bytes(pt(made), "here")
    assert Colour.RED.value == 1


def test_attributes_that_many_parameters_share_are_counted() -> None:
    meta = called(
        "torch._utils",
        "_rebuild_meta_tensor_no_storage",
        global_("torch", "float32"),
        tuple_(number(1)),
        tuple_(number(1)),
        b"\x89",
    )
    state = dict_of(*((text(f"z{i}"), b"N") for i in range(1000)))
    arguments = tuple_(meta, b"\x89", b"N", state) + put(1)
    parameter = global_("torch._utils", "_rebuild_parameter_with_state")
    with pytest.raises(UnsafePickle, match="far more memory than its"):
        load_bytes(pt(tuple_(parameter + arguments + b"R", (parameter + get(1) + b"R") * 1000)), "here")


def test_keys_that_were_made_are_told_apart_by_their_values() -> None:
    same = [number(index * (2**61 - 1)) for index in range(4)]
    keys = itertools.islice(itertools.product(same, repeat=9), 4000)
    body = dict_of(*((called("torch", "Size", tuple_(*key)), b"N") for key in keys))
    with pytest.raises(UnsafePickle, match="different keys of one hash"):
        load_bytes(pt(body), "here")


@pytest.mark.parametrize("version", ["_rebuild_tensor_v2", "_rebuild_tensor_v3"])
@pytest.mark.parametrize("kind", ["QInt8Storage", "CharStorage"])
def test_no_tensor_is_of_a_quantised_type(kind: str, version: str) -> None:
    arguments = [storage("0", 4, kind), number(0), tuple_(number(4)), tuple_(number(1)), b"\x89", b"N"]
    arguments += [global_("torch", "qint8")] if version.endswith("3") else []
    if kind == "CharStorage" and version.endswith("2"):
        arguments[-1] = global_("torch", "qint8")
    with pytest.raises(UnsafePickle, match=r"torch\.(QInt8Storage|qint8)', which is not on the allow-list"):
        load_bytes(pt(called("torch._utils", version, *arguments), s0=bytes(4)), "here")


@pytest.mark.parametrize(
    "value",
    [
        Counter({("a", "b"): 5, (): 0}),
        {(x, y): None for x in range(-20, 20) for y in range(-20, 20)},
        {**{f"k{index}": 0 for index in range(1200)}, **{b"k%d" % index: 1 for index in range(1200)}},
        torch.Size([-1, 3]),
        torch.Size([1] * 70),
        {torch.Size([1, 2]): 3, torch.float32: 4},
    ],
    ids=["counter", "signed grid", "texts and bytes", "negative size", "long size", "keys of torch's"],
)
def test_an_honest_value_is_read_as_torch_reads_it(value: Any) -> None:
    stream = _saved(value)
    found = load_bytes(stream.getvalue(), "here")
    assert type(found) is type(value)
    assert found == value == torch.load(stream, weights_only=True)


@pytest.mark.parametrize(
    "value",
    [{torch.float32, torch.int8}, Counter({torch.float32: 1}), {torch.device("cpu")}, frozenset({(1, -1), (1, -2)})],
    ids=["dtypes", "counter", "device", "frozenset"],
)
def test_what_a_save_takes_a_load_takes(value: Any) -> None:
    assert decode(load_bytes(_saved(encode(value, "extra")).getvalue(), "here")) == value


def test_one_tensor_in_many_places_is_copied_only_so_often(tmp_path: Path) -> None:
    path = tmp_path / "extra_000200_rank0.pt"
    for places, is_allowed in ((200, True), (3000, False)):
        torch.save([torch.zeros(1 << 16)] * places, path)
        if is_allowed:
            assert len(RankFiles({0: path}, 0).full_value(())) == places
        else:
            with pytest.raises(UnsafePickle, match="in so many places"):
                RankFiles({0: path}, 0).full_value(())


def test_a_legacy_checkpoint_that_makes_no_sense_is_inconsistent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"model": {"w": torch.zeros(2)}}, tmp_path / "model_000100.pt")
    write_meta(tmp_path, step=100)
    assert load_checkpoint(tmp_path / "model_000100.pt").model["w"].tolist() == [0.0, 0.0]

    def fail(*_: Any) -> None:
        raise ValueError("of odd types")

    monkeypatch.setattr("ckptmirror.formats.legacy.read_legacy", fail)
    with pytest.raises(IntegrityError, match="is inconsistent: ValueError: of odd types"):
        load_checkpoint(tmp_path / "model_000100.pt")
