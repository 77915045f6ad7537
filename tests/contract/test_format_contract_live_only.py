"""Every kind brings back paths, dates and times, and puts members of enums and generators into the live ones."""

from __future__ import annotations

import datetime
import enum
import random
import sys
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy
import pytest
import torch
from torch import nn

from ckptmirror import TrainState
from ckptmirror.core.errors import IntegrityError, UsageError
from ckptmirror.core.model import Kind, Meta
from ckptmirror.formats.live_only import SavedGenerator, SavedMember
from ckptmirror.formats.read_full import read_extra
from tests.kit.formats import KINDS, load, save

pytestmark = pytest.mark.parametrize("kind", KINDS)


class Phase(enum.Enum):
    WARM = 1
    MAIN = "main"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    ON = "on"
    OFF = "off"


class Part(enum.Flag):
    HEAD = 1
    BODY = 2


class Bits(enum.IntFlag):
    FIRST = 1


def state_of(extra: dict[str, Any]) -> TrainState:
    torch.manual_seed(0)
    return TrainState(model=nn.Linear(2, 2), extra=extra)


def through(kind: Kind, root: Path, saved: dict[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
    meta = save(kind, root, state_of(saved))
    return load(kind, root, meta, state_of(into)).missing


UTC = datetime.UTC
INDIA = datetime.timezone(datetime.timedelta(hours=5, minutes=30, seconds=1, microseconds=2), "here")


@pytest.mark.parametrize(
    "value",
    [
        Path("/data/run"),
        Path("relative"),
        Path("name\udcff"),
        PurePosixPath("a/b"),
        PureWindowsPath("c:/a"),
        datetime.datetime(2026, 11, 25, 1, 2, 3, 4),
        datetime.datetime(2026, 11, 25, 1, 2, 3, 4, UTC, fold=1),
        datetime.datetime(1, 1, 1, tzinfo=INDIA),
        datetime.date(9999, 12, 31),
        datetime.time(1, 2, tzinfo=INDIA),
        datetime.timedelta(days=-3, microseconds=7),
        datetime.timedelta.max,
    ],
    ids=repr,
)
def test_a_path_or_time_comes_back_wherever_it_is(kind: Kind, value: Any, tmp_path: Path) -> None:
    into: dict[str, Any] = {"deep": [None]}
    assert through(kind, tmp_path, {"value": value, "deep": [{"a": (value,)}], "set": {value}}, into) == ()
    for found in (into["value"], into["deep"][0]["a"][0], *into["set"]):
        assert (type(found), found, repr(found)) == (type(value), value, repr(value))
        assert getattr(found, "fold", 0) == getattr(value, "fold", 0)


class OwnPath(PurePosixPath):
    """A class of the user's."""


@pytest.mark.parametrize(
    "value",
    [OwnPath("a"), datetime.datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Paris")), {Phase.WARM}, {Phase.WARM: 1}],
    ids=repr,
)
def test_what_would_come_back_as_something_else_is_refused_while_saving(kind: Kind, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"extra\.deep\[0\]"):
        save(kind, tmp_path, state_of({"deep": [value]}))


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (Phase.MAIN, Phase.WARM),
        (Level.HIGH, Level.LOW),
        (Word.OFF, Word.ON),
        (Part.BODY, Part.HEAD),
        (Part.HEAD | Part.BODY, Part.HEAD),
        (Part(0), Part.HEAD),
        pytest.param(Bits(1 << 3000), Bits.FIRST, id="a flag with more bits than a safe load reads"),
    ],
    ids=repr,
)
def test_a_member_of_an_enum_takes_the_place_of_a_live_one(kind: Kind, saved: Any, now: Any, tmp_path: Path) -> None:
    into = {"phase": now, "deep": [{"a": (now, 1)}], "many": [now, now]}
    assert through(kind, tmp_path, {"phase": saved, "deep": [{"a": (saved, 2)}], "many": [saved, now]}, into) == ()
    assert into == {"phase": saved, "deep": [{"a": (saved, 2)}], "many": [saved, now]}
    assert into["phase"] is saved or isinstance(saved, enum.Flag)


class Other:
    """Has an enum of the same name."""

    class Phase(enum.Enum):
        """Of other members."""

        MAIN = "main"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (None, "extra.phase was saved as Phase.MAIN, and here it is a NoneType"),
        ("main", "and here it is a str"),
        (Level.LOW, "and here it is Level.LOW"),
        (Other.Phase.MAIN, "and here it is Other.Phase.MAIN"),
        ([Phase.WARM], "and here it is a list"),
    ],
    ids=repr,
)
def test_a_member_is_put_into_no_other_class(kind: Kind, now: Any, said: str, tmp_path: Path) -> None:
    """Also not into the one that a file names."""
    with pytest.raises(UsageError, match=said) as caught:
        through(kind, tmp_path, {"phase": Phase.MAIN}, {"phase": now})
    assert "Put a member of Phase there" in caught.value.hint


def test_a_member_that_the_class_has_no_more_is_named(kind: Kind, tmp_path: Path, monkeypatch: Any) -> None:
    meta = save(kind, tmp_path, state_of({"phase": Phase.MAIN, "part": Part.BODY}))

    class Fewer(enum.Enum):
        WARM = 1

    Fewer.__qualname__ = "Phase"
    with pytest.raises(UsageError, match=r"saved as Phase\.MAIN; Phase has no such member here"):
        load(kind, tmp_path, meta, state_of({"phase": Fewer.WARM, "part": Part.HEAD}))


def test_a_list_that_grew_needs_a_live_member_for_each(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"extra\.phases\[1\] was saved as Phase\.MAIN, and here it is a NoneType"):
        through(kind, tmp_path, {"phases": [Phase.WARM, Phase.MAIN]}, {"phases": [Phase.WARM]})
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UsageError, match=r"extra\.phases\[0\] was saved as Phase\.MAIN"):
        through(kind, other, {"phases": [Phase.MAIN]}, {"phases": None})


GENERATORS: dict[str, Any] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "python": random.Random,
    **{
        name: lambda seed, name=name: numpy.random.Generator(getattr(numpy.random, name)(seed))
        for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
    },
}


def draw(generator: Any) -> list[Any]:
    if isinstance(generator, torch.Generator):
        return torch.randint(1 << 60, (7,), generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.getrandbits(60), generator.gauss(0, 1)]
    return [*generator.integers(1 << 60, size=3).tolist(), int(generator.integers(1 << 20, dtype=numpy.uint32))]


@pytest.mark.parametrize("which", GENERATORS)
def test_a_generator_goes_on_where_it_was_in_place(kind: Kind, which: str, tmp_path: Path) -> None:
    make = GENERATORS[which]
    saved, now, inner = make(1), make(2), make(3)
    draw(saved)
    saved_inner = make(4)
    into: dict[str, Any] = {"g": now, "deep": [{"g": inner}]}
    assert through(kind, tmp_path, {"g": saved, "deep": [{"g": saved_inner}]}, into) == ()
    assert into["g"] is now
    assert into["deep"][0]["g"] is inner
    assert [draw(now) for _ in range(3)] == [draw(saved) for _ in range(3)]
    assert draw(inner) == draw(saved_inner)


@pytest.mark.parametrize(
    "now", [None, 3, random.Random(1), numpy.random.default_rng(1)], ids=lambda now: type(now).__name__
)
def test_a_generator_is_put_into_no_other_kind(kind: Kind, now: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"extra\.g was saved as a random number generator of kind torch cpu"):
        through(kind, tmp_path, {"g": torch.Generator()}, {"g": now})


def test_a_live_generator_that_was_saved_as_something_else_is_not_replaced(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"extra\.g holds a Generator here and was saved as a int"):
        through(kind, tmp_path, {"g": 3}, {"g": torch.Generator()})


def test_one_generator_in_two_places_gets_one_state(kind: Kind, tmp_path: Path) -> None:
    one = random.Random(1)
    shared = random.Random(2)
    assert through(kind, tmp_path, {"a": one, "b": [one]}, {"a": shared, "b": [shared]}) == ()
    assert draw(shared) == draw(random.Random(1))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UsageError, match="has another place in the state too"):
        through(kind, other, {"a": random.Random(1), "b": [random.Random(3)]}, {"a": shared, "b": [shared]})


def test_what_reads_a_save_without_a_live_state_sees_what_they_were(kind: Kind, tmp_path: Path) -> None:
    meta = save(kind, tmp_path, state_of({"phase": Phase.MAIN, "g": random.Random(1), "at": Path("/data")}))
    if kind == "emergency":
        return  # only a resume reads it
    extra = read_extra(tmp_path, meta)["extra"]  # type: ignore[index]
    assert extra["phase"] == SavedMember("Phase", "MAIN")
    assert isinstance(extra["g"], SavedGenerator)
    assert (extra["g"].kind, extra["at"]) == ("python", Path("/data"))


def changed(kind: Kind, root: Path, meta: Meta, change: Any) -> None:
    """Change the user's values in the file, as whoever may write there could."""
    start = "rank" if kind == "emergency" else "extra"
    path = root / next(a.path for a in meta.artifacts if Path(a.path).name.startswith(start))
    content = torch.load(path, weights_only=True)
    change((content["extra"] if kind == "emergency" else content)["extra"])
    torch.save(content, path)


def set_to(*keys: Any, value: Any) -> Any:
    def change(extra: Any) -> None:
        for key in keys[:-1]:
            extra = extra[key]
        extra[keys[-1]] = value

    return change


def written(**fields: Any) -> Any:
    return set_to("g", value={"__ckptmirror__": "written", **fields})


@pytest.mark.parametrize(
    ("which", "change"),
    [
        ("MT19937", set_to("g", "state", "state", "pos", value=625)),
        ("MT19937", set_to("g", "state", "state", "pos", value=-1)),
        ("MT19937", set_to("g", "state", "state", "key", value=3)),
        ("MT19937", set_to("g", "state", "state", "key", "data", value=torch.zeros(8, dtype=torch.uint8))),
        ("MT19937", set_to("g", "state", "state", "more", value=1)),
        ("Philox", set_to("g", "state", "buffer_pos", value=5)),
        ("Philox", set_to("g", "state", "buffer_pos", value=2**70)),
        ("PCG64", set_to("g", "state", "uinteger", value=2**32)),
        ("PCG64", set_to("g", "state", "has_uint32", value=True)),
        ("PCG64", set_to("g", "state", "state", "inc", value=-1)),
        ("PCG64", set_to("g", "state", "bit_generator", value="MT19937")),
        ("PCG64", set_to("g", "state", value=[])),
        ("PCG64", set_to("g", "state", value={})),
        ("python", set_to("g", "state", "words", value=torch.zeros(3, dtype=torch.int64))),
        ("python", set_to("g", "state", "gauss", value="1")),
        ("python", set_to("g", "kind", value=["python"])),
        ("torch", set_to("g", "state", "state", value=torch.zeros(9, dtype=torch.uint8))),
        ("torch", set_to("g", "state", "state", value=3)),
        ("torch", set_to("g", value={"__ckptmirror__": "enum", "enum": "a", "name": 3, "value": 0})),
        ("torch", written(kind="PosixPath", text=3)),
        ("torch", written(kind="Path", text="a")),
        ("torch", written(kind="datetime", text="yesterday")),
        (
            "torch",
            written(kind="datetime", text="2026-01-01", zone="x"),
        ),
        ("torch", written(kind="timedelta", text="999999999999 0 0")),
        ("torch", written(kind="timedelta", text="9" * 5000 + " 0 0")),
        ("torch", written(kind="datetime", text="2026-01-01", fold=2**70)),
        ("torch", set_to("g", value={"__ckptmirror__": "deque", "items": [], "maxlen": 2**70})),
    ],
)
def test_a_hostile_state_is_refused_before_it_reaches_a_generator(
    kind: Kind, which: str, change: Any, tmp_path: Path
) -> None:
    meta = save(kind, tmp_path, state_of({"g": GENERATORS[which](1)}))
    changed(kind, tmp_path, meta, change)
    with pytest.raises(IntegrityError):
        load(kind, tmp_path, meta, state_of({"g": GENERATORS[which](1)}))


def test_no_module_is_imported_for_a_class_that_a_file_names(kind: Kind, tmp_path: Path) -> None:
    meta = save(kind, tmp_path, state_of({"phase": Phase.MAIN}))
    changed(kind, tmp_path, meta, set_to("phase", "enum", value="antigravity.Phase"))
    with pytest.raises(UsageError, match=r"saved as antigravity\.Phase\.MAIN"):
        load(kind, tmp_path, meta, state_of({"phase": Phase.WARM}))
    assert "antigravity" not in sys.modules
