"""The comparison of live pieces with saved ones, without tensors: a piece's sums are those of its numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.regions import Region
from ckptmirror.core.tensor_proof import Compared, Summed, changed, compare, compare_whole, of_rank, read_list, total

VALUES = [(7 * at * at + 3, 11 * at + 5) for at in range(12)]  # the sums of each element of a tensor of 12


def piece(begin: int, end: int, *, name: str = "model.w", dtype: str = "float32", more: int = 0) -> Summed:
    first, second = total(VALUES[begin:end])
    return Summed(name, dtype, Region((12,), (begin,), (end - begin,)), (first + more, second))


def cut(*edges: int) -> list[Summed]:
    return [piece(begin, end) for begin, end in zip((0, *edges), (*edges, 12), strict=True)]


def test_a_piece_is_compared_with_the_saved_piece_at_its_place() -> None:
    assert compare([piece(0, 6)], [cut(6)]) == Compared((), ())
    assert compare([piece(0, 6, more=1)], [cut(6)]) == Compared(("model.w",), ())


def test_a_piece_that_no_list_here_has_needs_the_lists_of_more_ranks() -> None:
    assert compare([piece(0, 4)], [cut(6)]) == Compared((), ("model.w",))
    assert compare([piece(0, 4, name="model.v")], [cut(6)]) == Compared((), ("model.v",))


def test_what_each_rank_has_of_its_own_is_compared_with_its_own_list_alone() -> None:
    own = [piece(0, 12, more=1)._replace(per_rank=True), piece(0, 12, name="model.norm")]
    first = [
        piece(0, 12)._replace(per_rank=True),
        piece(0, 12, name="optimizer.moment")._replace(per_rank=True),
        piece(0, 12, name="model.norm", more=2),
    ]

    def result(live: list[Summed], own: list[Summed] | None) -> Compared:
        compared, lists = of_rank(live, own, first)
        return compare(compared, lists)

    assert result([piece(0, 12, more=1), piece(0, 12, name="model.norm", more=2)], own) == Compared((), ())
    assert result([piece(0, 12)], own) == Compared(("model.w",), ())
    assert result([piece(0, 12, name="optimizer.moment")], own) == Compared(("optimizer.moment",), ())
    assert result([piece(0, 12), piece(0, 12, name="optimizer.moment")], None) == Compared((), ())
    assert result([piece(0, 12, name="model.norm", more=1)], None) == Compared(("model.norm",), ())
    assert result([piece(0, 12)], []) == Compared(("model.w",), ())


def test_what_has_other_sums_than_before_or_is_gone_has_changed_and_what_is_cut_or_cast_otherwise_has_not() -> None:
    before = [piece(0, 6), piece(0, 12, name="model.v")]
    assert changed(before, before) == ()
    assert changed(before, [piece(0, 6, more=1), piece(0, 12, name="model.v")]) == ("model.w",)
    assert changed(before, [piece(0, 6)]) == ("model.v",)
    assert changed(before, [piece(0, 12), piece(0, 12, name="model.v", dtype="bfloat16", more=1)]) == ()


def test_a_tensor_of_another_dtype_or_shape_is_not_compared() -> None:
    assert compare([piece(0, 6, dtype="bfloat16", more=1)], [cut(6)]) == Compared((), ())


def test_what_ranks_of_the_save_held_differently_has_to_be_what_one_of_them_held() -> None:
    lists = [[piece(0, 12)], [piece(0, 12, more=9)]]
    assert compare([piece(0, 12)], lists) == compare([piece(0, 12, more=9)], lists) == Compared((), ())
    assert compare([piece(0, 12, more=1)], lists) == Compared(("model.w",), ())
    assert compare_whole([[piece(0, 12, more=1)]], lists, {"model.w"}).differ == ("model.w",)
    assert compare_whole([[one] for one in cut(5)], lists, {"model.w"}) == Compared((), ("model.w",))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pieces_that_are_cut_otherwise_add_up_to_what_was_saved(data: st.DataObject) -> None:
    edges = st.lists(st.integers(1, 11), unique=True, max_size=5).map(sorted)
    saved, live = cut(*data.draw(edges)), cut(*data.draw(edges))
    replicas = [[one] for one in live] + [[live[0]]]
    assert compare_whole(replicas, [saved, saved[:1]], {"model.w"}) == Compared((), ())
    at = data.draw(st.integers(0, len(live) - 1))
    region = live[at].region
    wrong = [*live[:at], piece(region.offsets[0], region.ends[0], more=data.draw(st.integers(1, 5))), *live[at + 1 :]]
    assert compare_whole([wrong], [saved], {"model.w"}) == Compared(("model.w",), ())


def test_replicas_that_differ_now_are_not_what_was_saved_once() -> None:
    wrong = [*cut(4), piece(0, 4, more=1)]
    assert compare_whole([wrong], [cut(6)], {"model.w"}).differ == ("model.w",)


def test_a_tensor_of_which_a_piece_is_in_no_list_is_not_compared() -> None:
    assert compare_whole([cut(4)], [cut(6)[:1]], {"model.w"}) == Compared((), ("model.w",))
    assert compare_whole([cut(4)[:1]], [cut(6)], {"model.w"}) == Compared((), ("model.w",))
    assert compare_whole([cut(4)], [], {"model.w"}) == Compared((), ("model.w",))


ENTRY = {
    "name": "model.w",
    "dtype": "float32",
    "shape": [4, 2],
    "offsets": [2, 0],
    "sizes": [2, 2],
    "fingerprint": [1, 4294967295],
}


def listed(*entries: Any) -> bytes:
    return json.dumps({"tensors": list(entries)}).encode()


def test_a_list_is_read() -> None:
    old = {"name": "model.v", "dtype": "float32", "shape": [1], "crc32c": 7}
    assert read_list(listed(ENTRY, old)) == [
        Summed("model.w", "float32", Region((4, 2), (2, 0), (2, 2)), (1, 4294967295))
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": 7},
        {"dtype": None},
        {"shape": [4]},
        {"offsets": [3, 0]},
        {"offsets": [-1, 0]},
        {"sizes": [2, True]},
        {"sizes": "22"},
        {"sizes": [2, 1 << 70]},
        {"fingerprint": [1]},
        {"fingerprint": [1, 2.0]},
        {"fingerprint": None},
    ],
    ids=str,
)
def test_a_broken_entry_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BrokenMeta, match=r"tensors\[0\]"):
        read_list(listed({**ENTRY, **wrong}))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"tensors": {}}', b'{"tensors": [7]}'])
def test_what_is_no_list_is_refused(data: bytes) -> None:
    with pytest.raises(BrokenMeta):
        read_list(data)
