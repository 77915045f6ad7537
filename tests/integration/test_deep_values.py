"""Values that are nested deep: what can be saved can be loaded, and what cannot is named before the save counts."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import CheckpointManager, load_checkpoint
from ckptmirror.core.errors import BackgroundSaveFailed, CkptMirrorError, UnsafePickle, UsageError
from ckptmirror.untrusted.read_limits import max_depth
from tests.kit.formats import make_state

pytestmark = pytest.mark.long

WRAPS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "list": (lambda value: [value], 1),
    "dict": (lambda value: {"a": value}, 1),
    "tuple": (lambda value: (value,), 1),
    "deque": (lambda value: deque([value]), 2),
    "ordered": (lambda value: OrderedDict(a=value), 3),
}


@pytest.fixture
def recursion_limit() -> Iterator[Callable[[int], None]]:
    before = sys.getrecursionlimit()
    yield sys.setrecursionlimit
    sys.setrecursionlimit(before)


def nested(kind: str, depth: int) -> Any:
    wrap, _ = WRAPS[kind]
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


def depth_of(value: Any) -> int:
    depth = 0
    while value != 1:
        value = next(iter(value.values() if isinstance(value, dict) else value))
        depth += 1
    return depth


def save_and_resume(root: Path, kind: str, depth: int) -> None:
    save(root, {"x": nested(kind, depth)})
    again = make_state()
    again.extra = {"x": nested(kind, depth)}
    with CheckpointManager(root, mirrors=[]) as manager:
        assert manager.resume(again) is not None
    assert depth_of(again.extra["x"]) == depth
    assert depth_of(load_checkpoint(root).extra["extra"]["x"]) == depth


@pytest.mark.parametrize("kind", WRAPS)
def test_what_is_saved_is_resumed_and_what_is_too_deep_is_named(
    kind: str, tmp_path: Path, recursion_limit: Callable[[int], None]
) -> None:
    recursion_limit(1500)  # 500 levels; the frames of the test runner take some of them
    assert max_depth() == 500
    save_and_resume(tmp_path / "deep", kind, 400 // WRAPS[kind][1])
    with pytest.raises((UsageError, BackgroundSaveFailed)) as caught:
        save_and_resume(tmp_path / "deeper", kind, 520 // WRAPS[kind][1])
    assert "extra.x" in caught.value.message
    assert "nested too deep to be saved: the limit is 500" in caught.value.message
    assert len(caught.value.message) < 400


def test_a_program_with_more_room_saves_what_is_deeper_and_one_with_less_is_told(
    tmp_path: Path, recursion_limit: Callable[[int], None]
) -> None:
    before = sys.getrecursionlimit()
    recursion_limit(10_000)
    save_and_resume(tmp_path, "list", 2000)
    recursion_limit(before)
    with pytest.raises(UnsafePickle, match="nested more than 333 deep") as caught:
        load_checkpoint(tmp_path)
    assert "sys.setrecursionlimit" in caught.value.hint


def save(root: Path, extra: dict[str, Any]) -> None:
    state = make_state()
    state.extra = extra
    with CheckpointManager(root, mirrors=[]) as manager:
        manager.resume(state)
        manager.save(200, state).wait("committed")


def test_a_list_that_holds_itself_is_named(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CkptMirrorError, match=r"extra\.endless\[0\].* nested too deep"):
        save(tmp_path, {"fine": [1], "endless": endless})


def test_a_key_that_no_load_takes_is_named_with_the_reason(tmp_path: Path) -> None:
    key: Any = ()
    for _ in range(20):
        key = (key,)
    with pytest.raises(UsageError, match=r"extra\.table has a key .*: It has a key that holds too much, or too deep"):
        save(tmp_path, {"table": {key: 1}})
