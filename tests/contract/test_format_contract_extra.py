"""What every kind of save promises about the user's own values: objects in containers, kinds, what is refused."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ckptmirror.core.errors import UsageError
from ckptmirror.core.model import Kind, Meta
from ckptmirror.formats import TrainState
from tests.kit.formats import KINDS, files_below, load, make_state, same_bits, save

pytestmark = pytest.mark.parametrize("kind", KINDS)


class Meter:
    """An object with a state."""

    def __init__(self, count: int = 0, values: Any = None) -> None:
        self.count, self.values = count, values

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.values = state["count"], state["values"]


class Deaf:
    """An object that tells its state and takes none."""

    def state_dict(self) -> dict[str, int]:
        return {}


def through(kind: Kind, root: Path, saved: dict[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
    """Save one extra state and load it into another; return what was missing."""
    meta = save(kind, root, TrainState(model=nn.Linear(2, 2), extra=saved))
    report = load(kind, root, meta, TrainState(model=nn.Linear(2, 2), extra=into))
    assert "extra" in report.loaded
    return report.missing


def test_objects_in_lists_tuples_and_dicts_are_given_their_state(kind: Kind, tmp_path: Path) -> None:
    def build(*counts: int) -> dict[str, Any]:
        a, b, c, d, e = map(Meter, counts)
        return {"list": [a, b], "tuple": (c, 7), "dict": {"deep": deque([d])}, "ordered": OrderedDict(x=e)}

    into = build(0, 0, 0, 0, 0)
    meters = [*into["list"], into["tuple"][0], into["dict"]["deep"][0], into["ordered"]["x"]]
    kept = {key: into[key] for key in ("list", "dict", "ordered")}
    assert through(kind, tmp_path, build(1, 2, 3, 4, 5), into) == ()
    assert [meter.count for meter in meters] == [1, 2, 3, 4, 5]
    assert [*into["list"], into["tuple"][0], into["dict"]["deep"][0], into["ordered"]["x"]] == meters
    assert into["tuple"][1] == 7
    assert all(into[key] is container for key, container in kept.items())


def test_another_number_of_objects_is_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"same number of extra\.meters"):
        through(kind, tmp_path, {"meters": [Meter(), Meter()]}, {"meters": [Meter()]})


def test_an_object_that_was_saved_as_another_kind_of_container_is_refused(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"extra\.meters holds a Meter here and was saved as a dict"):
        through(kind, tmp_path, {"meters": {"a": Meter()}}, {"meters": [Meter()]})


@pytest.mark.parametrize(
    ("where", "told"), [("extra", "is a Deaf with state_dict() but without"), ("ema", "is of type Deaf, which has no")]
)
def test_an_object_that_could_not_be_given_its_state_is_refused_while_saving(
    kind: Kind, where: str, told: str, tmp_path: Path
) -> None:
    state = make_state()
    setattr(state, where, {"deep": [Deaf()]})
    with pytest.raises(UsageError, match=re.escape(f"{where}.deep[0] {told} load_state_dict")):
        save(kind, tmp_path, state)


def test_a_list_of_shadow_models_round_trip(kind: Kind, tmp_path: Path) -> None:
    def build(seed: int) -> TrainState:
        torch.manual_seed(seed)
        return TrainState(model=nn.Linear(2, 2), ema=[nn.Linear(2, 2), nn.Linear(3, 3)])

    state, other = build(0), build(1)
    meta = save(kind, tmp_path, state)
    kept = other.ema[0].weight
    load(kind, tmp_path, meta, other)
    assert other.ema[0].weight is kept
    same_bits([dict(one.state_dict()) for one in state.ema], [dict(one.state_dict()) for one in other.ema])


def test_shadow_models_that_share_a_parameter_come_back_so(kind: Kind, tmp_path: Path) -> None:
    def build(seed: int) -> TrainState:
        torch.manual_seed(seed)
        ema = [nn.Linear(2, 2), nn.Linear(2, 2)]
        ema[1].bias = ema[0].bias
        return TrainState(model=nn.Linear(2, 2), ema=ema)

    state, other = build(0), build(1)
    load(kind, tmp_path, save(kind, tmp_path, state), other)
    assert other.ema[1].bias is other.ema[0].bias
    same_bits([dict(one.state_dict()) for one in state.ema], [dict(one.state_dict()) for one in other.ema])


def test_what_the_save_lacks_of_the_live_values_is_loud(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    into: dict[str, Any] = {"old": 0, "new": Meter(9), "number": 7, "nested": {"gone": Meter(8), "kept": 1}}
    missing = through(kind, tmp_path, {"old": 1, "nested": {}}, into)
    assert [line.partition(":")[0] for line in missing] == [
        "extra.nested.gone",
        "extra.nested.kept",
        "extra.new",
        "extra.number",
    ]
    assert "The save holds no extra.new" in caplog.text
    assert (into["old"], into["new"].count, into["number"]) == (1, 9, 7)
    assert into["nested"]["gone"].count == 8
    assert into["nested"]["kept"] == 1


def test_tensors_in_containers_are_filled_in_place(kind: Kind, tmp_path: Path) -> None:
    def build(value: float) -> dict[str, Any]:
        full = [torch.full((3,), value + i) for i in range(4)]
        return {"list": [full[0], 1], "tuple": (full[1],), "deque": deque([full[2]], maxlen=2), "dict": {"x": full[3]}}

    into = build(0.0)
    tensors = [into["list"][0], into["tuple"][0], into["deque"][0], into["dict"]["x"]]
    through(kind, tmp_path, build(5.0), into)
    assert [tensor[0].item() for tensor in tensors] == [5.0, 6.0, 7.0, 8.0]
    assert all(now is before for now, before in zip(
        (into["list"][0], into["tuple"][0], into["deque"][0], into["dict"]["x"]), tensors, strict=True
    ))  # fmt: skip
    assert into["deque"].maxlen == 2


def test_a_tensor_that_shows_one_value_many_times_is_replaced(kind: Kind, tmp_path: Path) -> None:
    into = {"x": torch.zeros(1).expand(3)}
    through(kind, tmp_path, {"x": torch.arange(3.0)}, into)
    assert into["x"].tolist() == [0.0, 1.0, 2.0]


def test_an_inference_tensor_is_replaced(kind: Kind, tmp_path: Path) -> None:
    def build(value: float) -> dict[str, Any]:
        with torch.inference_mode():
            return {"x": [torch.full((3,), value)]}

    into = build(0.0)
    through(kind, tmp_path, build(5.0), into)
    assert into["x"][0].tolist() == [5.0, 5.0, 5.0]


def test_a_live_defaultdict_takes_the_saved_factory(kind: Kind, tmp_path: Path) -> None:
    into: dict[str, Any] = {"counts": defaultdict(list)}
    counts = into["counts"]
    through(kind, tmp_path, {"counts": defaultdict(int, a=1)}, into)
    assert into["counts"] is counts
    assert counts["new"] == 0


HUGE = 1 << 5000


class Subclass(numpy.ndarray):
    """An array that means more than its numbers."""


@pytest.mark.parametrize(
    "value",
    [
        HUGE,
        -HUGE - 1,
        [HUGE, {"deep": (HUGE,)}],
        {HUGE - 1},
        b"",
        [b"", {"deep": (b"",)}],
        {b""},
        numpy.bytes_(b""),
        numpy.float32(0.1),
        numpy.float64("nan"),
        numpy.int64(7),
        numpy.bool_(True),
        numpy.complex64(1 + 2j),
        numpy.longdouble("0.1"),
        numpy.datetime64("2020-01-01"),
        numpy.timedelta64(3, "h"),
        numpy.str_("text"),
        numpy.bytes_(b"raw\0x"),
        numpy.arange(3, dtype=">i4"),
        numpy.array([1.5], dtype=numpy.longdouble),
        defaultdict(list, {"a": [1]}),
        Counter("abca"),
        (deque([1, (2,)], maxlen=3),),
    ],
    ids=lambda value: f"{type(value).__name__}-{str(value)[:12]}",
)
def test_a_value_comes_back_as_the_same_kind(kind: Kind, value: Any, tmp_path: Path) -> None:
    into: dict[str, Any] = {}
    assert through(kind, tmp_path, {"value": value}, into) == ()
    found = into["value"]
    assert type(found) is type(value)
    if isinstance(value, numpy.ndarray | numpy.generic):
        assert found.dtype == value.dtype
        assert found.tobytes() == value.tobytes()
    else:
        assert found == value


@pytest.mark.parametrize(
    "value",
    [
        numpy.ma.array([1.0, 2.0], mask=[False, True]),
        numpy.arange(3).view(Subclass),
        numpy.array([(1, 2.0)], dtype=[("a", int), ("b", float)]).view(numpy.recarray),
        {HUGE: 1},
        {b"": 1},
        {(1, b""): 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_kind_that_would_be_lost_is_refused_while_saving(kind: Kind, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        save(kind, tmp_path, TrainState(model=nn.Linear(2, 2), extra={"deep": [value]}))
    assert caught.value.message.startswith("extra.deep[0] ")
    assert files_below(tmp_path) == []


class Unloadable(int):
    """An int to the encoder, and nothing that a safe load knows."""


@pytest.mark.parametrize("part", ["extra", "optimizer"])
def test_a_value_that_the_encoder_lets_through_and_no_load_takes_is_not_committed(
    kind: Kind, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptmirror.formats import weights_only_values as plain

    monkeypatch.setattr(plain, "_PLAIN", (*plain._PLAIN, Unloadable))
    state = make_state()
    if part == "extra":
        state.extra = {"value": Unloadable(3)}
    else:
        state.optimizer.param_groups[0]["value"] = [Unloadable(3), torch.ones(2)]
    with pytest.raises(UsageError, match=r"could not be loaded back, so it is not saved.*Unloadable"):
        save(kind, tmp_path, state)
    assert [path for path in files_below(tmp_path) if ".tmp" not in str(path.relative_to(tmp_path))] == []


def test_positions_of_ranks_that_are_gone_are_reported(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = TrainState(model=nn.Linear(2, 2), dataloader=Meter(5))
    meta = save(kind, tmp_path, state)
    more = _as_of_three_ranks(kind, tmp_path, meta)
    other = TrainState(model=nn.Linear(2, 2), dataloader=Meter())
    report = load(kind, tmp_path, more, other)
    assert other.dataloader.count == 5
    assert "dataloader" in report.loaded
    assert [line.partition(":")[0] for line in report.missing] == ["dataloader"]
    assert "positions of ranks 1, 2 of the save are dropped" in report.missing[0]
    assert "positions of ranks 1, 2 of the save are dropped" in caplog.text
    assert load(kind, tmp_path, more, other, world_size=3).missing == ()


def test_values_of_ranks_that_differed_are_reported_where_the_number_of_ranks_changed(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = TrainState(model=nn.Linear(2, 2), extra={"seen": [1, numpy.float32("nan")], "t": torch.ones(2)})
    more = _as_of_three_ranks(kind, tmp_path, save(kind, tmp_path, state))
    other = TrainState(model=nn.Linear(2, 2), extra={})
    assert load(kind, tmp_path, more, other, world_size=1).missing == ()
    assert "extra" not in str(load(kind, tmp_path, more, other, rank=3, world_size=4).missing)
    _change_extra(kind, tmp_path, more, rank=2)
    for rank, world_size, said in (
        (0, 1, "the values of ranks 2 of the save, which differ from rank 0's, are dropped"),
        (3, 4, "the ranks of the save had different values; this rank is new and takes rank 0's"),
        (0, 4, None),
        (0, 3, None),
    ):
        caplog.clear()
        missing = load(kind, tmp_path, more, other, rank=rank, world_size=world_size).missing
        lines = [line for line in missing if line.startswith("extra: ")]
        assert [said in line for line in lines] == ([True] if said else [])
        assert (said or "extra: ") in caplog.text or said is None
        assert other.extra is not None
        assert other.extra["seen"][0] == 1


def _change_extra(kind: Kind, root: Path, meta: Meta, *, rank: int) -> None:
    """Give the user's values in one rank's file another value."""
    start = "rank" if kind == "emergency" else "extra"
    path = root / next(a.path for a in meta.artifacts if a.rank == rank and Path(a.path).name.startswith(start))
    content = torch.load(path, weights_only=True)
    (content["extra"] if kind == "emergency" else content)["extra"]["seen"][0] = 2
    torch.save(content, path)


@pytest.mark.parametrize("here", [True, False], ids=["enabled here", "disabled here"])
def test_a_scaler_that_was_disabled_is_missed_only_where_it_is_enabled(kind: Kind, here: bool, tmp_path: Path) -> None:
    off, now = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (False, here))
    meta = save(kind, tmp_path, TrainState(model=nn.Linear(2, 2), scaler=off))
    missing = load(kind, tmp_path, meta, TrainState(model=nn.Linear(2, 2), scaler=now)).missing
    assert [line.partition(":")[0] for line in missing] == (["scaler"] if here else [])


def test_a_scaler_that_is_disabled_here_is_not_said_to_be_loaded(kind: Kind, tmp_path: Path) -> None:
    on, off = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, False))
    meta = save(kind, tmp_path, TrainState(model=nn.Linear(2, 2), scaler=on))
    report = load(kind, tmp_path, meta, TrainState(model=nn.Linear(2, 2), scaler=off))
    assert [line.partition(":")[0] for line in report.missing] == ["scaler"]
    assert "scaler" not in report.loaded
    other = tmp_path / "several"
    other.mkdir()
    meta = save(kind, other, TrainState(model=nn.Linear(2, 2), scaler=[on, on], extra={"amp": {"own": on}}))
    state = TrainState(model=nn.Linear(2, 2), scaler=[on, off], extra={"amp": {"own": off}})
    missing = load(kind, other, meta, state).missing
    assert [line.partition(":")[0] for line in missing] == ["scaler[1]", "extra.amp.own"]


def _as_of_three_ranks(kind: Kind, root: Path, meta: Meta) -> Meta:
    """Return the meta of the same save by three ranks that hold alike what rank 0 holds."""
    mine = next(a for a in meta.artifacts if Path(a.path).name.startswith("rank" if kind == "emergency" else "extra"))
    artifacts = list(meta.artifacts)
    for rank in (1, 2):
        path = mine.path.replace("rank0", f"rank{rank}")
        shutil.copy(root / mine.path, root / path)
        artifacts.append(dataclasses.replace(mine, path=path, rank=rank))
    return dataclasses.replace(meta, artifacts=tuple(artifacts), world_size=3)
