"""Which memory is spoken for, and when two trees are the same."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ckptmirror.core.errors import UsageError
from ckptmirror.core.load_options import PARTS, checked_parts
from ckptmirror.core.regions import Region
from ckptmirror.formats.already_filled import Taken, overlaps_itself, same, span_of
from ckptmirror.formats.shards import Piece
from ckptmirror.formats.train_state import TrainState, left_out

BASE = torch.arange(24.0).reshape(4, 6)


def sees(taken: torch.Tensor, asked: torch.Tensor) -> bool:
    account = Taken()
    account.take(taken, "the model")
    return account.owner_of(asked) == "the model"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (BASE, BASE, True),
        (BASE, BASE.t(), True),
        (BASE[1:2], BASE, True),
        (BASE[:2], BASE[2:], False),
        (BASE[:, 0], BASE[:, 1], False),
        (BASE[:, 0], BASE[:, :2], True),
        (BASE[:, 0], BASE[1], True),
        (BASE[:, :3], BASE[:, 3:], False),
        (BASE[0], BASE[0].view(torch.uint8)[20:], True),
        (BASE, BASE.clone(), False),
        (BASE[:1].expand(5, 6), BASE[0], True),
        (nn.Parameter(BASE), BASE, True),
        (BASE[:0], BASE, False),
        (torch.empty(2, device="meta"), torch.empty(2, device="meta"), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), False),
    ],
)
def test_memory_is_known_by_the_bytes_that_are_seen(one: torch.Tensor, other: torch.Tensor, expected: bool) -> None:
    assert sees(one, other) is sees(other, one) is expected


def test_what_is_taken_is_kept_so_that_its_place_is_not_used_again() -> None:
    account = Taken()
    account.take([torch.ones(1000)], "gone")
    assert all(account.owner_of(torch.ones(1000)) is None for _ in range(20))


def test_tensors_that_have_no_memory_yet_are_no_obstacle() -> None:
    account = Taken()
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 2, device="meta"))
    account.take(model, "the model")
    assert span_of(model[0].weight) is None
    assert account.owner_of(model[0].weight) is None


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (BASE, False),
        (BASE.t(), False),
        (BASE[::2, 1::2], False),
        (torch.ones(1).expand(3), True),
        (torch.ones(1).expand(1), False),
        (torch.ones(4).unfold(0, 2, 1), True),
        (torch.ones(4).unfold(0, 2, 2), False),
        (torch.ones(0).expand(3, 0), False),
        (torch.tensor(1.0), False),
    ],
)
def test_a_tensor_that_lies_upon_itself_is_seen(tensor: torch.Tensor, expected: bool) -> None:
    assert overlaps_itself(tensor) is expected


def piece(*offsets: int, values: float = 0.0) -> Piece:
    return Piece(Region((4,), offsets, (2,)), torch.full((2,), values))


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]}, True),
        ({"a": [torch.ones(2)]}, {"a": [torch.zeros(2)]}, False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.ones(2, 1), torch.ones(1, 2), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.ones(2), nn.Parameter(torch.ones(2)), True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ({"a": 1}, OrderedDict(a=1), False),
        (defaultdict(list), defaultdict(int), False),
        (deque([1], 2), deque([1], 3), False),
        ([1], [1, 2], False),
        (1, True, False),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (numpy.array([1.0, float("nan")]), numpy.array([1.0, float("nan")]), True),
        (numpy.arange(2), numpy.arange(3), False),
        (numpy.float32("nan"), numpy.float32("nan"), True),
        (Plain([1, torch.ones(1)]), Plain([1, torch.ones(1)]), True),
        (Plain(1), Plain(2), False),
        (piece(0), piece(0), True),
        (piece(0), piece(2), False),
        (piece(0), piece(0, values=1.0), False),
        (piece(0), torch.zeros(2), False),
    ],
)
def test_two_trees_are_the_same_bit_for_bit(one: Any, other: Any, expected: bool) -> None:
    assert same(one, other) is same(other, one) is expected


def test_pieces_of_one_tensor_may_count_as_alike() -> None:
    assert same([piece(0)], [piece(2, values=1.0)], shards_alike=True)
    assert not same([piece(0), torch.ones(1)], [piece(2), torch.zeros(1)], shards_alike=True)


@pytest.mark.parametrize("wrong", ["optimizer", ("optimiser",), ["model", 3]])
def test_parts_to_leave_out_are_checked(wrong: Any) -> None:
    with pytest.raises(UsageError, match="exclude holds"):
        checked_parts(wrong)


def test_parts_that_are_left_out_are_named_if_they_are_there() -> None:
    assert checked_parts(PARTS) == frozenset(PARTS)
    lines = left_out(TrainState(model=nn.Linear(1, 1), extra={}), ("extra", "optimizer", "rng"))
    assert [line.partition(":")[0] for line in lines] == ["extra", "rng"]
