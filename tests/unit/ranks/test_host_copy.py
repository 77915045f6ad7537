"""What a host copy keeps, what it shares, and what it refuses."""

from __future__ import annotations

import io
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptmirror.core.errors import UsageError
from ckptmirror.ranks.host_copy import HostCopier

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Shot:
    model: dict[str, Any]
    extra: Any


class Words(tuple):
    """A tuple that is more than its items."""


class Named(Pair):
    """A namedtuple that has room for attributes."""


class Bag(dict):
    """A dict that is more than its items."""


@dataclass
class Seen:
    count: Any

    def __post_init__(self) -> None:
        self.total = 0  # not a field


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def forms() -> dict[str, torch.Tensor]:
    wide = torch.randn(64, 33)
    return {
        "plain": torch.randn(7, 5),
        "transposed": wide.t(),
        "column": wide[:, 3],
        "expanded": torch.randn(4, 1).expand(4, 1000),
        "every_second": torch.arange(100.0)[::2],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 9),
        "bf16": torch.randn(33).to(torch.bfloat16),
        "half": torch.randn(33).half(),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.randn(5, dtype=torch.complex64),
        "conjugate": torch.randn(5, dtype=torch.complex128).conj(),
        "negative": torch.randn(5, dtype=torch.complex64).conj().imag,
        "int8": torch.arange(-5, 5, dtype=torch.int8),
        "float8": torch.randn(16).to(torch.float8_e4m3fn),
        "uint16": torch.arange(9, dtype=torch.int32).to(torch.uint16),
        "odd_nan": torch.tensor([0x7FC12345, 0x7F812345], dtype=torch.int32).view(torch.float32),
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("name", sorted(forms()))
def test_every_form_of_tensor_arrives_bit_for_bit(name: str) -> None:
    source = forms()[name]
    host = HostCopier().copy({"t": source}).tree["t"]
    assert host.shape == source.shape
    assert host.dtype == source.dtype
    assert bits(host) == bits(source)
    assert not host.requires_grad
    assert type(host) is torch.Tensor
    assert host.device.type == "cpu"


@pytest.mark.parametrize("longest_first", [True, False])
def test_tensors_over_one_array_of_numpy_are_copied_and_shared_whatever_their_lengths(longest_first: bool) -> None:
    """Their storages begin at one address and have different sizes."""
    array = np.arange(1000, dtype=np.float32)
    lengths = {"all": 1000, "ten": 10, "half": 500}
    order = sorted(lengths, key=lambda name: lengths[name], reverse=longest_first)
    source = {name: torch.from_numpy(array[: lengths[name]]) for name in order}
    host = HostCopier().copy(source).tree
    for name, length in lengths.items():
        assert torch.equal(host[name], torch.arange(length, dtype=torch.float32))
    host["ten"][0] = 77.0
    assert host["all"][0] == host["half"][0] == 77.0


def test_snapshot_is_isolated_from_inplace_update() -> None:
    state = {"forms": forms(), "numbers": [1, [2, 3]], "text": bytearray(b"abc")}
    before = {name: bits(t) for name, t in state["forms"].items()}  # type: ignore[attr-defined]
    tree = HostCopier().copy(state).tree
    with torch.no_grad():
        for tensor in state["forms"].values():  # type: ignore[attr-defined]
            base = tensor if tensor._base is None else tensor._base
            base.zero_() if base.dtype != torch.bool else base.fill_(False)
    state["numbers"][1].append(4)  # type: ignore[index]
    state["text"][0] = 0  # type: ignore[index]
    state["new"] = 1
    assert {name: bits(t) for name, t in tree["forms"].items()} == before
    assert tree["numbers"] == [1, [2, 3]]
    assert tree["text"] == bytearray(b"abc")
    assert sorted(tree) == ["forms", "numbers", "text"]


def test_structure_and_plain_values_come_back_as_they_were() -> None:
    weight = torch.ones(3)
    shared = {"lr": 0.1}
    tree = Shot(
        {"a": OrderedDict([("w", weight)]), "b": (1, "x", weight)},
        Pair([shared, shared], {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, 3: None, "set": {1, 2}}),
    )
    copied = HostCopier().copy(tree).tree
    assert type(copied) is Shot
    assert type(copied.model["a"]) is OrderedDict
    assert copied.model["b"][:2] == (1, "x")
    assert copied.model["b"][2] is copied.model["a"]["w"]
    assert copied.model["b"][2] is not weight
    assert tree.model["b"][2] is weight
    assert type(copied.extra) is Pair
    assert copied.extra.left[0] is copied.extra.left[1]
    assert copied.extra.left[0] is not shared
    assert copied.extra.right == tree.extra.right
    assert type(copied.extra.right["size"]) is torch.Size


@pytest.mark.parametrize(
    "value",
    [Counter("aab"), defaultdict(int, a=1), deque([1, 2], maxlen=3), OrderedDict(b=1, a=2), Pair(1, [2])],
    ids=lambda value: type(value).__name__,
)
def test_a_container_keeps_its_kind_and_its_tensors_are_copied(value: Any) -> None:
    source = {"here": value, "at": deque([torch.ones(2)]), "count": Counter(t=torch.ones(2))}
    copied = HostCopier().copy(source).tree
    assert type(copied["here"]) is type(value)
    assert copied["here"] == value
    assert copied["here"] is not value
    assert getattr(copied["here"], "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(copied["here"], "default_factory", None) is getattr(value, "default_factory", None)
    source["at"][0].zero_()
    source["count"]["t"].zero_()
    assert copied["at"][0].tolist() == copied["count"]["t"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("build", [lambda: Words((1, 2)), lambda: Named(1, 2), lambda: Bag(a=1), lambda: Seen(3)])
def test_an_object_is_copied_with_all_that_it_has(build: Any) -> None:
    source = build()
    source.extra = {"weight": torch.ones(3)}
    copied = HostCopier().copy({"here": source}).tree["here"]
    source.extra["weight"].zero_()
    source.extra["new"] = 1
    assert type(copied) is type(source)
    assert copied == build()
    assert vars(copied).keys() == vars(source).keys()
    assert list(copied.extra) == ["weight"]
    assert copied.extra["weight"].tolist() == [1.0, 1.0, 1.0]


def test_tensors_in_objects_share_bytes_with_others_and_take_no_more_memory_than_they_show() -> None:
    huge = torch.arange(1_000_000.0).view(1000, 1000)
    weight = torch.nn.Parameter(torch.ones(100))
    shared = [1]
    tree = {"one": Seen({"w": weight, "s": shared}), "two": Seen([huge[:, 7], shared]), "weight": weight}
    lease = HostCopier().copy(tree)
    one, two, host = (lease.tree[name] for name in ("one", "two", "weight"))
    assert one.count["w"] is host
    assert not host.requires_grad
    assert one.count["s"] is two.count[1]
    assert torch.equal(two.count[0], huge[:, 7])
    assert lease.size_bytes == 100 * 4 + 1000 * 4
    assert two.count[0].untyped_storage().nbytes() == 1000 * 4


def test_an_object_that_cannot_be_copied_is_refused_with_its_path_and_holds_nothing() -> None:
    copier = HostCopier()
    with pytest.raises(UsageError, match=r"state\.deep\[0\]: a Seen cannot be copied"):
        copier.copy({"deep": [Seen(threading.Lock())]})
    assert copier.copy({"fine": 1}).tree == {"fine": 1}


def test_tied_weights_and_views_of_one_storage_stay_shared_and_are_copied_once() -> None:
    base = torch.arange(100_000.0)
    copier = HostCopier()
    lease = copier.copy({"all": base, "tied": base.detach(), "square": base.view(100, 1000), "rows": base[5000:9000]})
    assert lease.size_bytes == base.nbytes
    hosts = lease.tree
    hosts["all"][5000] = -1
    assert hosts["tied"][5000] == hosts["square"][5, 0] == hosts["rows"][0] == -1
    lease.release()
    apart = copier.copy([base[:10], base[10:20]]).tree
    assert apart[0].untyped_storage().data_ptr() != apart[1].untyped_storage().data_ptr()


def test_a_tiny_view_does_not_drag_its_huge_storage_along() -> None:
    huge = torch.arange(1_000_000.0).view(1000, 1000)
    lease = HostCopier().copy({"column": huge[:, 7], "corner": huge[:2, :2], "same": huge[:, 7]})
    assert lease.size_bytes <= 3 * 1000 * 4
    assert torch.equal(lease.tree["column"], huge[:, 7])
    assert torch.equal(lease.tree["same"], huge[:, 7])
    assert torch.equal(lease.tree["corner"], huge[:2, :2])


def test_views_of_different_item_sizes_share_one_odd_storage() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    tree = {"late": raw[3:40], "floats": raw[4:36].view(torch.float32), "long": raw[8:24].view(torch.int64)}
    lease = HostCopier().copy(tree)
    for name, source in tree.items():
        assert bits(lease.tree[name]) == bits(source)
    assert lease.size_bytes <= 64


def test_each_tensor_has_a_storage_of_its_own_so_a_file_holds_only_it() -> None:
    lease = HostCopier().copy({"big": torch.zeros(1_000_000), "small": torch.zeros(10)})
    out = io.BytesIO()
    torch.save(lease.tree["small"], out)
    assert len(out.getvalue()) < 10_000


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.empty(3, device="meta"), "meta device"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised"),
        (torch.eye(3).to_sparse(), "layout"),
    ],
)
def test_a_tensor_without_plain_bytes_is_refused_with_its_path(tensor: torch.Tensor, why: str) -> None:
    copier = HostCopier()
    with pytest.raises(UsageError, match=rf"state\.model\.w\[1\] cannot be copied: .*{why}"):
        copier.copy({"model": {"w": [1, tensor]}})
    assert copier.copy({"fine": torch.ones(1)}).tree["fine"] == 1


def test_a_freed_storage_is_refused() -> None:
    gone = torch.ones(100)
    gone.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match=r"state\.w .*freed"):
        HostCopier().copy({"w": gone})


def test_a_structure_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself"):
        HostCopier().copy(loop)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_views_of_one_storage_arrive_whole(data: st.DataObject) -> None:
    base = torch.arange(240.0)
    views = []
    for _ in range(data.draw(st.integers(1, 5))):
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
        stride = data.draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
        views.append(base.as_strided(shape, stride, data.draw(st.integers(0, 60))))
    lease = HostCopier().copy(views)
    assert lease.size_bytes <= 2 * sum(view.nbytes for view in views)
    for host, source in zip(lease.tree, views, strict=True):
        assert torch.equal(host, source)
        assert host.untyped_storage().data_ptr() != base.untyped_storage().data_ptr() or not host.numel()


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.barrier()
    dist.destroy_process_group()


def test_a_dtensor_comes_back_as_a_dtensor_that_a_checkpoint_can_be_planned_from(
    one_rank_group: None, tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as dcp

    mesh = init_device_mesh("cpu", (1,))
    local = torch.randn(6, 4)
    source = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    host = HostCopier().copy({"w": source}).tree["w"]
    expected = local.clone()
    local.zero_()
    assert isinstance(host, DTensor)
    assert not isinstance(host, torch.nn.Parameter)
    assert not host.requires_grad
    assert (host.placements, host.device_mesh, host.shape) == (source.placements, mesh, source.shape)
    assert torch.equal(host.to_local(), expected)
    assert host.to_local().untyped_storage().data_ptr() != local.untyped_storage().data_ptr()
    dcp.save({"w": host}, checkpoint_id=tmp_path)
    target = {"w": DTensor.from_local(torch.zeros(6, 4), mesh, [Shard(0)])}
    dcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"].to_local(), expected)
